"""A verl rollout named "hf_cpu": Hugging Face's forward in a Ray actor, without vLLM.

``VERL_USE_EXTERNAL_MODULES=...,verl_cpu.rollout`` and ``actor_rollout_ref.rollout.name=hf_cpu``.
What a request draws follows from its prompt, the weights' version and how many requests for that
prompt came before it in that version, to whichever replica (`Turns`): not from which replica serves
it, nor from what it is batched with. ``VERL_CPU_FAULT`` lets something go wrong in a step:
``kill-server:2``, ``hang-sync:2``. ``VERL_CPU_LENGTHS=8,16,32`` cuts responses off at 8 tokens in
the first step, at 16 in the second, and at the last of them from there on.
"""

import asyncio
import hashlib
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import ray
import torch

from nereus_plugins.post_import import after_import

GATHER_S = 0.02


class Turns:
    """Numbers the requests for each prompt and version, over all replicas of a job."""

    def __init__(self):
        self.taken = Counter()

    def take(self, prompt, version):
        self.taken[prompt, version] += 1
        return self.taken[prompt, version]


class HFServer:
    """The interface of verl's vLLM server actor."""

    def __init__(self, model_path, response_length, frees=False):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.response_length, self.global_steps = response_length, None
        self.frees, self.shapes = frees, None
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.thread = ThreadPoolExecutor(1)
        self.queue, self.running = [], False
        # For a test that holds responses where they are; those that are computed right now.
        self.going, self.begun = threading.Event(), 0
        self.going.set()
        # Detached: it outlives the server that happened to start it.
        self.turns = (
            ray.remote(Turns)
            .options(
                name="hf_cpu_turns",
                namespace="verl_cpu",
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
            )
            .remote()
        )
        # The gate of verl's vLLM server, by its names; what waits there hears of nothing but it.
        self._resume_event = asyncio.Event()
        self._submission_paused = self._rejecting = False

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        if _faulty("kill-server", self.global_steps):
            os._exit(1)
        while self._submission_paused:
            if self._rejecting:
                return self.output([], [], "aborted")
            await self._resume_event.wait()
        turn = await self.turns.take.remote(tuple(prompt_ids), self.global_steps)
        answer = asyncio.get_running_loop().create_future()
        self.queue.append((list(prompt_ids), dict(sampling_params), turn, answer))
        if not self.running:
            self.running = True
            self.drainer = asyncio.create_task(self.drain())
        return self.output(*await answer)

    def output(self, ids, log_probs, reason):
        from verl.workers.rollout.replica import TokenOutput

        return TokenOutput(
            token_ids=ids,
            log_probs=log_probs,
            stop_reason=reason,
            num_preempted=0,
            extra_fields={"global_steps": self.global_steps, "num_cached_tokens": 0},
        )

    async def drain(self):
        await asyncio.sleep(GATHER_S)
        while self.queue:
            batch, self.queue = self.queue[:64], self.queue[64:]
            loop = asyncio.get_running_loop()
            try:
                found = await loop.run_in_executor(self.thread, self.sample, batch)
                for (_, _, _, answer), sampled in zip(batch, found, strict=True):
                    answer.set_result(sampled)
            except Exception as error:
                for _, _, _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
        self.running = False

    @torch.no_grad()
    def sample(self, batch):
        longest = max(len(prompt) for prompt, *_ in batch)
        ids = torch.tensor([[self.pad] * (longest - len(p)) + p for p, *_ in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, *_ in batch])
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        limits = [p.get("max_tokens") or self.response_length for _, p, *_ in batch]
        limits = [min(n, _longest(self.global_steps, n)) for n in limits]
        heat = torch.tensor([max(float(p.get("temperature", 1.0)), 0.0) for _, p, *_ in batch])
        draws = []
        for prompt, _, turn, _ in batch:
            key = (tuple(prompt), self.global_steps, turn)
            seed = hashlib.sha256(str(key).encode()).digest()[:8]
            draws.append(torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1))
        past, inputs = None, ids
        tokens, log_probs = [[] for _ in batch], [[] for _ in batch]
        done = [False] * len(batch)
        for _ in range(max(limits)):
            if self._submission_paused:
                break  # aborted: what there is goes back, verl's client asks for the rest
            out = self.model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=position,
                past_key_values=past,
                use_cache=True,
            )
            past = out.past_key_values
            logp = torch.log_softmax(
                out.logits[:, -1].float() / heat[:, None].clamp(min=1e-5), dim=-1
            )
            picked = torch.tensor(
                [
                    int(row.exp().multinomial(1, generator=draw) if t > 0 else row.argmax())
                    for row, t, draw in zip(logp, heat, draws, strict=True)
                ]
            )
            for i, token in enumerate(picked.tolist()):
                if not done[i]:
                    tokens[i].append(token)
                    log_probs[i].append(float(logp[i, token]))
                    done[i] = token == self.eos or len(tokens[i]) >= limits[i]
            self.begun = len(batch)
            self.going.wait()
            if all(done):
                break
            inputs, position = picked[:, None], position[:, -1:] + 1
            mask = torch.cat([mask, torch.ones(len(batch), 1, dtype=mask.dtype)], dim=1)
        self.begun = 0
        reasons = ["completed" if end else "aborted" for end in done]
        return list(zip(tokens, log_probs, reasons, strict=True))

    async def load_weights(self, state):
        def load():
            self.model.load_state_dict(state, strict=False)

        await asyncio.get_running_loop().run_in_executor(self.thread, load)

    async def set_global_steps(self, step):
        self.global_steps = step

    async def wait_for_requests_to_drain(self):
        while self.queue or self.running:
            await asyncio.sleep(0.01)

    async def abort_all_requests(self, reject_request=False):
        self._submission_paused, self._rejecting = True, reject_request
        self._resume_event.clear()
        await self.wait_for_requests_to_drain()
        return {"aborted_count": 0, "request_ids": []}

    async def resume_generation(self):
        self._submission_paused = self._rejecting = False
        self._resume_event.set()

    async def sleep(self):
        """Free the weights, where the job wants that."""
        if self.frees and self.shapes is None:
            self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
            for parameter in self.model.parameters():
                parameter.data = torch.empty(0)

    async def wake_up(self, tags=None):
        """Have room for weights; they are nothing until a synchronization brings some."""
        if self.shapes is not None:
            for name, parameter in self.model.named_parameters():
                parameter.data = torch.full(self.shapes[name], torch.nan)
            self.shapes = None

    async def nothing(self, *_, **__):
        pass

    clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    start_profile = stop_profile = shutdown = nothing


def _longest(step, otherwise):
    """Tokens allowed in a step by a schedule that a test set."""
    lengths = os.environ.get("VERL_CPU_LENGTHS")
    if not lengths:
        return otherwise
    each = [int(n) for n in lengths.split(",")]
    return each[min(step or 0, len(each) - 1)]


def _faulty(kind, step):
    """Whether this is the moment at which a test wants something to go wrong."""
    return f"{kind}:{step}" in os.environ.get("VERL_CPU_FAULT", "").split(",")


def _server_name(replica_rank):
    return f"hf_cpu_server_{replica_rank}"


def _replica_class():
    from verl.workers.rollout.replica import RolloutReplica

    class HFReplica(RolloutReplica):
        async def launch_servers(self):
            path = getattr(self.model_config, "path", None) or self.model_config["path"]
            name = _server_name(self.replica_rank) + self.name_suffix
            actor = ray.remote(HFServer)
            server = actor.options(name=name, max_concurrency=512, num_cpus=0).remote(
                path, self.config.response_length, self.config.free_cache_engine
            )
            await server.wake_up.remote()
            self.servers, self._server_handle, self._server_address = [server], server, name

    return HFReplica


def _adapter_class():
    from verl.workers.rollout.base import BaseRollout
    from verl.workers.rollout.utils import ensure_async_iterator

    class HFAdapter(BaseRollout):
        def __init__(self, config, model_config, device_mesh, replica_rank=-1, **_):
            super().__init__(config, model_config, device_mesh)
            rank, tp = int(os.environ["RANK"]), self.config.tensor_model_parallel_size
            self.replica_rank = rank // tp if replica_rank == -1 else replica_rank
            self.rollout_rank = rank % tp
            self.is_leader_rank = self.rollout_rank == 0

        async def resume(self, tags):
            if self.is_leader_rank and self.config.free_cache_engine:
                await ray.get_actor(_server_name(self.replica_rank)).wake_up.remote(tags)

        async def release(self):
            pass

        @torch.no_grad()
        async def update_weights(self, weights, global_steps=None, **_):
            if _faulty("hang-sync", global_steps):
                await asyncio.sleep(3600)
            state = {}
            # Every rank walks the weights: gathering one is a collective.
            async for name, tensor in ensure_async_iterator(weights):
                if self.is_leader_rank:
                    state[name] = tensor.detach().to("cpu", copy=True)
            if self.is_leader_rank:
                server = ray.get_actor(_server_name(self.replica_rank))
                await server.load_weights.remote(state)
                if global_steps is not None:
                    await server.set_global_steps.remote(global_steps)

    return HFAdapter


def __getattr__(name):
    """Build the class that verl resolves by its full name, when it does."""
    if name == "HFAdapter":
        globals()[name] = _adapter_class()
        return globals()[name]
    raise AttributeError(name)


def _register_replica(module):
    module.RolloutReplicaRegistry.register("hf_cpu", _replica_class)


def _register_adapter(module):
    module._ROLLOUT_REGISTRY["hf_cpu", "async"] = "verl_cpu.rollout.HFAdapter"


after_import("verl.workers.rollout.replica", _register_replica)
after_import("verl.workers.rollout.base", _register_adapter)
