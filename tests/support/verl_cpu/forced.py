"""Transitions that a test asks for, and what the state was before and after each.

``VERL_USE_EXTERNAL_MODULES=...,verl_cpu.forced`` with ``VERL_CPU_FORCED={"2": {"actor/train":
["tp2pp1", 4]}}``: after step 2, the named stages get that layout on the first 4 devices, or, with a
list in place of 4, on those of these numbers; with "2+" amid step 2, when its batch has been
sampled. What was seen goes to ``VERL_CPU_FORCED_LOG``, one
JSON object a transition. State is read around the adapter: whole tensors are gathered and digested
with SHA-256.
"""

import hashlib
import json
import os
import time
import weakref

import ray
import torch

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl.facts import training_workers
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.workload import ModelStage
from nereus_plugins.post_import import after_import
from verl_cpu import faults, varlen
from verl_cpu.asked import version

DIGESTS_S = 60
"""For ranks to gather and digest what they hold. Chosen, not measured."""
SETTLE_S = 30
"""For Ray to have heard of processes and bundles that went. Chosen, not measured."""


def sha256(worker):
    """Digest every whole tensor of this rank's engines; runs on all ranks at once."""
    found = {}
    for role, trainer in training_workers(worker):
        engine = trainer.engine
        states = engine.optimizer.state if engine.optimizer is not None else {}
        for name, parameter in engine.module.named_parameters():
            slots = {"param": parameter, **states.get(parameter, {})}
            for slot, tensor in slots.items():
                whole = tensor.detach()
                whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
                data = whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[f"{role}/{slot}/{name}"] = hashlib.sha256(data).hexdigest()
        if engine.lr_scheduler is not None:
            found[f"{role}/lr_scheduler"] = str(sorted(engine.lr_scheduler.state_dict().items()))
    return found


def digests(trainer):
    """Return those of all tensors, and whether all ranks that have one have the same.

    Each unit holds a copy of its own, and each of its pipeline stages a part.
    """
    workers = trainer.actor_rollout_wg.workers
    numbered = {Device("rank", i): worker for i, worker in enumerate(workers)}
    answers = call_all(numbered, sha256, awaited="digests", timeout_s=DIGESTS_S)
    whole = {name: one for answer in answers.values() for name, one in answer.items()}
    alike = all(answer.items() <= whole.items() for answer in answers.values())
    return whole, alike


def local_world(worker):
    """Return what this rank takes for the number of ranks on its node: verl asks it for that."""
    return int(os.environ["RAY_LOCAL_WORLD_SIZE"])


def beside(trainer):
    workers = trainer.actor_rollout_wg.workers
    numbered = {Device("rank", i): worker for i, worker in enumerate(workers)}
    return list(call_all(numbered, local_world, awaited="ranks on a node", timeout_s=60).values())


def modules(worker):
    """Return models by role; torch moves no parameter that a weak reference is to."""
    return {role: held.engine.module for role, held in training_workers(worker)}


def lingering(worker):
    """Name roles whose engine of the last time this was asked is gone and yet in memory."""
    now, last = modules(worker), getattr(worker, "_seen", {})
    worker._seen = {role: weakref.ref(module) for role, module in now.items()}
    return [r for r, ref in last.items() if ref() is not None and ref() is not now.get(r)]


def sharing(worker):
    """Say how this rank's engines share sequences, and heads that its attention saw since asked."""
    left = lingering(worker)
    from transformers.integrations import flash_attention
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group

    seen = sorted(varlen.heads)
    varlen.heads.clear()
    return {
        "heads": seen,
        "lingering": left,
        "patch": flash_attention._flash_attention_forward.__module__,
        "outside": get_ulysses_sequence_parallel_group() is None,
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "degrees": {
            role: held.engine.ulysses_sequence_parallel_size
            for role, held in training_workers(worker)
        },
        "parts": {
            role: [held.engine.get_data_parallel_rank(), held.engine.is_mp_src_rank_with_outputs()]
            for role, held in training_workers(worker)
        },
    }


def shared(trainer):
    workers = trainer.actor_rollout_wg.workers
    numbered = {Device("rank", i): worker for i, worker in enumerate(workers)}
    return list(call_all(numbered, sharing, awaited="sequence ranks", timeout_s=60).values())


def servers(trainer):
    """Name the server of each replica: the same name is the same process."""
    manager = getattr(trainer, "standalone_server_manager", None) or trainer.llm_server_manager
    replicas = manager.rollout_replicas
    return [replica.servers[0]._actor_id.hex() for replica in replicas]


def planned(controller, wanted):
    devices = controller._adapter.job().cluster.devices
    placements = dict(controller.plan)
    for stage, (layout, which) in wanted.items():
        chosen = devices[:which] if isinstance(which, int) else tuple(devices[i] for i in which)
        placements[ModelStage.parse(stage)] = Placement.packed(Layout.parse(layout), chosen)
    return Plan(placements)


def settled():
    """Return the devices that Ray has free, once it has heard of those that went."""
    seen = []
    deadline = time.monotonic() + SETTLE_S
    while len(seen) < 3 or len(set(seen[-3:])) > 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {SETTLE_S} s for Ray's free devices to settle: {seen}")
        seen.append(ray.available_resources().get("GPU", 0.0))
        time.sleep(1)  # Ray's own period of telling resources
    return seen[-1]


def versions(trainer):
    """Return the step whose weights each server on the balancer has."""
    manager = getattr(trainer, "standalone_server_manager", None) or trainer.llm_server_manager
    listed = ray.get(manager.global_load_balancer.get_all_servers.remote(), timeout=60)
    handles = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
    assert sorted(listed) == sorted(handles), (listed, sorted(handles))
    asked = [handle.__ray_call__.remote(version) for handle in handles.values()]
    return dict(zip(handles, ray.get(asked, timeout=60), strict=True))


def _force(module):
    plans = json.loads(os.environ.get("VERL_CPU_FORCED", "{}"))
    at_boundary, before_training = module.Session.at_boundary, module.Session.before_training

    def go(session, moment):
        trainer = session.controller._adapter._trainer
        step = int(trainer.global_steps)
        wanted = plans.get(f"{step}{moment}")
        if not wanted:
            return
        record = {"step": step, "moment": moment}
        record["before"], alike = digests(trainer)
        record["versions"], record["served"] = versions(trainer), servers(trainer)
        record["shared_before"] = shared(trainer)
        faults.arm(f"{step}{moment}", session.controller._adapter)
        start_s = time.perf_counter()
        try:
            decision = session.controller.go_to(planned(session.controller, wanted), "test")
            record["seconds"] = time.perf_counter() - start_s
            record["admitted"] = decision.admitted
            record["shared"] = shared(trainer)
            record["after"], still = digests(trainer)
            record["alike"] = [alike, still]
            record["free"] = settled()
            record["world"] = trainer.actor_rollout_wg.world_size
            record["beside"] = beside(trainer)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            record.setdefault("seconds", time.perf_counter() - start_s)
            record["serve"] = servers(trainer)
            record["plan"] = session.controller.plan.to_json()
            with open(os.environ["VERL_CPU_FORCED_LOG"], "a") as file:
                file.write(json.dumps(record) + "\n")

    def forced_boundary(self):
        go(self, "")
        return at_boundary(self)

    def forced_training(self, prompt, response):
        go(self, "+")
        return before_training(self, prompt, response)

    module.Session.at_boundary = forced_boundary
    module.Session.before_training = forced_training


after_import("nereus_plugins.session", _force)
