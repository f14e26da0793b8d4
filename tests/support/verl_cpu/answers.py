"""What was asked of a job's rollouts, what its servers answered, and with whose weights.

``VERL_USE_EXTERNAL_MODULES=...,verl_cpu.forced,verl_cpu.answers``, in that order, with vLLM's
servers. Every process writes to a file of its own in the job's folder, a line for

- ``asked``, ``got``: what an agent loop asks of verl's client for asynchronous trainers, and what
  it gets: once each, whatever becomes of the servers in between;
- ``piece``: what one server answered of it, and the version of the weights that it says it had.

The trainer's own weights are kept beside, before each boundary: of version N those after step N.
It takes its samples as soon as they are there, so that others are still under way.

``VERL_CPU_FAULT=late:2:0`` holds one request back that has got the server of replica 0 in step 2,
and sends it there when the transition after that step has switched. ``busy:2`` has every server
answer requests of the test's own before that: as a separate_async job switches, and before a
colocate_async one stops its servers for that step.
"""

import asyncio
import itertools
import json
import os
import threading
import time
from pathlib import Path
from uuid import uuid4

import ray
import torch

from nereus_adapters.ray_calls import ask, call_all
from nereus_adapters.verl.facts import training_workers
from nereus_core.cluster import Device
from nereus_plugins.post_import import after_import

SAMPLE_S = 0.05
"""Between looks at what has been sampled; verl's own are 2 s apart. Chosen, not measured."""
LATE_S = 300
"""For a transition whose replicas have to start. Chosen, not measured."""
BUSY = 8
"""Requests of the test's own: more than two servers have under way at a time, two each."""
BUSY_S = 60
"""Until they have begun. Chosen, not measured."""
CALL_S = 60
"""For a server to say who it is. Chosen, not measured."""
POLL_S = 0.1
"""Between looks at what others have to do. Chosen, not measured."""
_numbers, _own = itertools.count(), set()


def _write(**line):
    path = _work() / f"answers-{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({**line, "time": time.time()}) + "\n")


def _work():
    return Path(os.environ["VERL_CPU_WORK"])


def _faults():
    return os.environ.get("VERL_CPU_FAULT", "").split(",")


def _ended():
    """Return the last step that has ended, whose weights are there."""
    return max((int(path.stem.split("-")[1]) for path in _work().glob("weights-*.pt")), default=0)


async def _late(request, server):
    """Hold a request back, if it is the one that is to be late."""
    fault = next((f for f in _faults() if f.startswith("late:")), "late:0:0")
    step, replica = map(int, fault.split(":")[1:])
    work = _work()
    if not step or _ended() < step - 1 or (work / "late").exists():
        return
    if await asyncio.wait_for(server.__ray_call__.remote(_replica), CALL_S) != replica:
        return
    try:
        (work / "late").touch(exist_ok=False)
    except FileExistsError:
        return
    _write(kind="late", request=request)
    deadline = time.monotonic() + LATE_S
    while not (work / f"switched-{step}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {LATE_S} s for the transition after step {step}")
        await asyncio.sleep(POLL_S)


def _replica(server):
    return server.replica_rank


def _client(module):
    client = module.FullyAsyncLLMServerClient
    generate, acquire = client.generate, client._acquire_server

    async def acquired(self, request_id, **extra):
        found = await acquire(self, request_id, **extra)
        await _late(request_id, found[1])
        return found

    client._acquire_server = acquired

    async def generated(self, request_id, *, prompt_ids, **others):
        name = f"{os.getpid()}.{next(_numbers)}"
        _write(
            kind="asked",
            request=request_id,
            name=name,
            prompt=list(prompt_ids),
            step=_ended(),
            own=request_id in _own,
        )
        try:
            found = await generate(self, request_id, prompt_ids=prompt_ids, **others)
        except BaseException as error:
            _write(kind="failed", request=request_id, name=name, error=repr(error))
            raise
        tokens, log_probs = list(found.token_ids), list(found.log_probs)
        _write(kind="got", request=request_id, name=name, tokens=tokens, log_probs=log_probs)
        return found

    client.generate = generated
    # The server hears of a request by this name, a new one each time; it begins with the client's.
    module.LLMServerClient._vllm_request_id = lambda self, name: f"{name}-{uuid4().hex}"


def _server(module):
    server = module.vLLMHttpServer
    generate = server.generate

    async def generated(self, prompt_ids, sampling_params, request_id, **others):
        prompt = list(prompt_ids)
        found = await generate(self, prompt_ids, sampling_params, request_id, **others)
        _write(
            kind="piece",
            request=request_id.split("-")[0],
            server=self.replica_rank,
            process=ray.get_runtime_context().get_actor_id(),
            tp=self.config.tensor_model_parallel_size,
            version=found.extra_fields["global_steps"],
            prompt=prompt,
            tokens=list(found.token_ids),
            log_probs=list(found.log_probs or []),
            reason=found.stop_reason,
        )
        return found

    server.generate = generated


def whole(worker):
    """Return the actor's weights, on rank 0 alone; runs on all ranks at once."""
    found = {}
    for role, held in training_workers(worker):
        if role == "actor":
            for name, parameter in held.engine.module.named_parameters():
                tensor = parameter.detach()
                tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[name] = tensor.cpu().clone()
    return found if torch.distributed.get_rank() == 0 else None


def keep(trainer):
    """Write the actor's weights down as what they are after this step."""
    workers = trainer.actor_rollout_wg.workers
    numbered = {Device("rank", i): worker for i, worker in enumerate(workers)}
    found = call_all(numbered, whole, awaited="the actor's weights", timeout_s=60)
    path = _work() / f"weights-{int(trainer.global_steps)}.pt"
    torch.save(found[Device("rank", 0)], path)


def _boundary(module):
    at_boundary = module.Session.at_boundary

    def kept(self):
        keep(self.controller._adapter._trainer)
        return at_boundary(self)

    module.Session.at_boundary = kept


def _switch(module):
    link = module.Standalone.link

    def linked(self, units, *, anew=False):
        step = int(self._trainer.global_steps)
        if f"busy:{step}" in _faults():
            _occupy(self._trainer.get_llm_client(), self._manager.server_handles)
        link(self, units, anew=anew)
        (_work() / f"switched-{step}").touch()

    module.Standalone.link = linked


def _stop(module):
    trainer = module.PPOTrainerColocateAsync
    stop = trainer.on_sample_end

    def on_sample_end(self):
        if f"busy:{int(self.global_steps)}" in _faults():
            _occupy(self.get_llm_client(), self.llm_server_manager.server_handles)
        stop(self)

    trainer.on_sample_end = on_sample_end


def _occupy(client, servers):
    """Ask through verl's own client, and come back when every server is at it."""
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    drawn["ignore_eos"] = True  # as long as any may be: verl stops none before its first token
    names = [uuid4().hex for _ in range(BUSY)]
    _own.update(names)

    async def requests():
        asked = (
            client.generate(name, prompt_ids=list(range(5, 20 + i)), sampling_params=drawn)
            for i, name in enumerate(names)
        )
        await asyncio.gather(*asked)

    # What it raises is written down, as what becomes of a request; the test asks for it there.
    threading.Thread(target=lambda: asyncio.run(requests()), daemon=True).start()
    deadline = time.monotonic() + BUSY_S
    awaited = "the number of requests under way"
    while not all(ask(servers, _under_way, awaited=awaited, timeout_s=CALL_S)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {BUSY_S} s for every server to be at a request")
        time.sleep(POLL_S)


def _under_way(server):
    return len(server.engine.output_processor.request_states)


def _samples(module):
    begin = module.ReplayBuffer.__init__

    def __init__(self, *args, **others):
        begin(self, *args, **others)
        self.poll_interval = SAMPLE_S

    module.ReplayBuffer.__init__ = __init__


after_import("verl.trainer.ppo.v1.replay_buffer", _samples)
after_import("verl.trainer.ppo.v1.trainer_colocate_async", _stop)
after_import("verl.workers.rollout.llm_server", _client)
after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", _server)
after_import("nereus_plugins.session", _boundary)
after_import("nereus_adapters.verl.standalone", _switch)
