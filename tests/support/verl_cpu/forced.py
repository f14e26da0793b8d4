"""Transitions that a test asks for, and what the state was before and after each.

``VERL_USE_EXTERNAL_MODULES=...,verl_cpu.forced`` with ``VERL_CPU_FORCED={"2": {"actor/train":
["tp2pp1", 4]}}``: after step 2, the named stages get that layout on the first 4 devices. What was
seen goes to ``VERL_CPU_FORCED_LOG``, one JSON object a transition. State is read around the
adapter: whole tensors are gathered and digested with SHA-256.
"""

import hashlib
import json
import os
import time

import torch

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl.facts import training_workers
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.workload import ModelStage
from nereus_plugins.post_import import after_import
from verl_cpu import faults


def sha256(worker):
    """Digest every whole tensor of every engine; runs on all ranks at once, rank 0 answers."""
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
    workers = trainer.actor_rollout_wg.workers
    numbered = {Device("rank", i): worker for i, worker in enumerate(workers)}
    answers = call_all(numbered, sha256, awaited="digests", timeout_s=60)
    return answers[Device("rank", 0)]


def local_world(worker):
    """Return what this rank takes for the number of ranks on its node: verl asks it for that."""
    return int(os.environ["RAY_LOCAL_WORLD_SIZE"])


def beside(trainer):
    workers = trainer.actor_rollout_wg.workers
    numbered = {Device("rank", i): worker for i, worker in enumerate(workers)}
    return list(call_all(numbered, local_world, awaited="ranks on a node", timeout_s=60).values())


def servers(trainer):
    """Name the server of each replica: the same name is the same process."""
    replicas = trainer.llm_server_manager.rollout_replicas
    return [replica.servers[0]._actor_id.hex() for replica in replicas]


def planned(controller, wanted):
    devices = controller._adapter.job().cluster.devices
    placements = dict(controller.plan)
    for stage, (layout, count) in wanted.items():
        placements[ModelStage.parse(stage)] = Placement.packed(
            Layout.parse(layout), devices[:count]
        )
    return Plan(placements)


def _force(module):
    steps = {int(k): v for k, v in json.loads(os.environ.get("VERL_CPU_FORCED", "{}")).items()}
    once = module.Session.at_boundary

    def at_boundary(self):
        trainer = self.controller._adapter._trainer
        wanted = steps.get(int(trainer.global_steps))
        if wanted:
            record = {"step": int(trainer.global_steps), "before": digests(trainer)}
            record["served"] = servers(trainer)
            faults.arm(record["step"], self.controller._adapter)
            start_s = time.perf_counter()
            try:
                decision = self.controller.go_to(planned(self.controller, wanted), "test")
                record["admitted"] = decision.admitted
                record["after"] = digests(trainer)
                record["world"] = trainer.actor_rollout_wg.world_size
                record["beside"] = beside(trainer)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {error}"
                raise
            finally:
                record["seconds"] = time.perf_counter() - start_s
                record["serve"] = servers(trainer)
                record["plan"] = self.controller.plan.to_json()
                with open(os.environ["VERL_CPU_FORCED_LOG"], "a") as file:
                    file.write(json.dumps(record) + "\n")
        return once(self)

    module.Session.at_boundary = at_boundary


after_import("nereus_plugins.session", _force)
