"""The conformance harness: a tiny PPO or GRPO job of OpenRLHF on four logical devices of one Ray.

OpenRLHF's own trainer runs in the harness's process, where a job has it in an actor; ranks and
engines are the actors that they are in any job. They are started once: a launch has ranks leave
their group and build another, and takes over the engines that run already where their degree is
right - a logical device of a CPU is a name.

The harness is for OpenRLHF on a CPU. What it needs changed for that is the business of whoever
starts it (tests/support/openrlhf_cpu), not of the harness.
"""

from __future__ import annotations

import copy
import gc
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group

from nereus_adapters.openrlhf import (
    CAPABILITIES,
    engines,
    facts,
    groups,
    harness_assets,
    harness_behind,
    harness_look,
)
from nereus_adapters.openrlhf.adapter import OpenRLHFAdapter
from nereus_adapters.openrlhf.experience import per_group
from nereus_adapters.openrlhf.groups import Parked
from nereus_adapters.openrlhf.harness_job import quiet, trainer_over, units_of
from nereus_adapters.openrlhf.harness_kept import Kept
from nereus_adapters.openrlhf.harness_look import WAIT_S
from nereus_adapters.openrlhf.linking import FAILURES
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.openrlhf.seats import Bundle
from nereus_adapters.openrlhf.signals import Signals
from nereus_adapters.openrlhf.supply import FILE, Supply
from nereus_adapters.ray_calls import ask, outcome
from nereus_core.capabilities import Feature
from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import Unsupported
from nereus_core.gate import Gate
from nereus_core.harness import Array, Fault, StepResult, Tier
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, Algorithm, Job, ModelStage, Stage

_LOSSES = {"actor": "policy_loss", "critic": "critic_loss"}
_START_S = 180.0
"""An actor or an engine that starts on a busy machine; chosen, not measured."""


class OpenRLHFHarness:
    """Launches tiny jobs in one Ray. Implements `nereus_core.harness.Harness`."""

    tier = Tier.REAL

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nereus-openrlhf-harness-"))
        self._short = tempfile.mkdtemp(prefix="orl")  # Ray's sockets need a short path
        with quiet():
            ray.init(
                address="local", num_cpus=32, num_gpus=4, include_dashboard=False,
                object_store_memory=300 * 2**20, _temp_dir=self._short, log_to_driver=False,
            )  # fmt: skip
            harness_assets.write(self._folder)
            self._args = {
                name: harness_assets.arguments(harness_assets.flags(self._folder, critic=critic))
                for name, critic in (("grpo", False), ("ppo", True))
            }
        pg = placement_group([{"GPU": 1, "CPU": 1}] * 4)
        outcome(pg.ready(), "four devices of the harness's Ray", WAIT_S)
        devices = tuple(Device(ray.util.get_node_ip_address(), index) for index in range(4))
        self._cluster = Cluster(devices, CPU_SEAT, LOOPBACK, LOOPBACK)
        self._bundles = {d: Bundle(pg, i, i) for i, d in enumerate(self._cluster.devices)}
        self._kept = Kept()
        self._numbers = {
            harness_assets.prompt(n): n
            for n in range(harness_assets.GLOBAL_BATCH * harness_assets.STEPS)
        }
        self._running: Running | None = None
        self._adapter: OpenRLHFAdapter | None = None
        self._trained: list[dict[str, Array]] = []
        self._asked: list[str] = []

    # --- Launching ------------------------------------------------------------------------------

    def job(self, algorithm: Algorithm = "grpo") -> Job:
        """What Nereus reads of the job from OpenRLHF's arguments, on four devices."""
        if algorithm not in self._args:
            raise Unsupported(f"algorithm {algorithm}", "the harness has PPO and GRPO")
        args = self._args[algorithm]
        workload = facts.workload(
            critic=algorithm == "ppo", ref=True, reward=False, asynchronous=False
        )
        config = dict(harness_assets.MODEL, model_type="qwen2")
        models = facts.models(workload, {"actor": config, "critic": config})
        return facts.job_of(args, workload, models, self._cluster, harness_assets.STEPS)

    def launch(self, job: Job, plan: Plan) -> OpenRLHFAdapter:
        """Start a job; processes of the last one go on, and what does not answer is ended.

        Raises:
            Unsupported: the job is asynchronous, or has pipelines.
        """
        if job.workload.asynchronous:
            why = CAPABILITIES.features[Feature.ASYNC_BOUNDARY].reason
            raise Unsupported("a boundary amid generation of an asynchronous job", why)
        if any(placement.layout.pp > 1 for placement in plan.values()):
            raise Unsupported(f"{plan}", "OpenRLHF has no pipeline parallelism")
        last = self._let_go()
        with quiet():
            try:
                try:
                    self._kept.take(last)
                    self._start(job, plan)
                except FAILURES:
                    self._kept.end(last, self._let_go())
                    self._start(job, plan)
            except BaseException:
                self._kept.end(last, self._let_go())
                raise
        self._trained = [self._given()]
        assert self._adapter is not None
        return self._adapter

    def _let_go(self) -> Running | None:
        running, self._running, self._adapter = self._running, None, None
        return running

    def _start(self, job: Job, plan: Plan) -> None:
        args = copy.deepcopy(self._args[job.workload.algorithm])
        running = Running(
            trainer_over(args, [s for s in job.workload.stages if s != ACTOR_GENERATE]),
            facts.BackendSection(call_s=WAIT_S, start_s=_START_S, warm_engines=1),
            Gate(WAIT_S),
            Signals(),
            dict(self._bundles),
            UnitMap(units_of(plan)),
            self._kept.ranks,
            waiting=self._kept.waiting,
        )
        self._running = running
        running.max_steps = running.trainer.get_max_steps()
        for unit in running.alive.of(ACTOR_GENERATE):
            self._kept.give(running, unit)
        engines.start_missing(running)
        for stage in running.groups:
            groups.seat(running, stage, Parked())
            if stage.stage is Stage.TRAIN:
                ask(running.handles(stage), harness_behind.settle, awaited=f"moments of {stage}",
                    timeout_s=WAIT_S)  # fmt: skip
        engines.await_all(running)
        engines.tie(running)
        for stage, group in running.groups.items():
            running.signals.listen_to_group(stage, group)
        running.signals.listen_to_steps(running.trainer)
        per_group(running.trainer.experience_maker)
        self._listen_to_prompts(running.trainer)
        self._adapter = OpenRLHFAdapter(
            running, job, version("openrlhf"), Supply(lambda: running.devices, self._folder / FILE)
        )
        self._adapter.warm()

    def _listen_to_prompts(self, trainer: Any) -> None:
        """Note prompts in the order in which the data loader gives them; responses have another."""
        generator = trainer.samples_generator
        dispatch = generator._dispatch_prompts_to_vllm

        def noted(prompts: Any, *rest: Any, **more: Any) -> Any:
            self._asked += prompts
            return dispatch(prompts, *rest, **more)

        generator._dispatch_prompts_to_vllm = noted

    # --- Stepping -------------------------------------------------------------------------------

    @property
    def running_job(self) -> Running:
        """The job launched last."""
        if self._running is None:
            raise RuntimeError("launch a job first")
        return self._running

    def step(self) -> StepResult:
        """Run one step: the body of the loop of `PPOTrainer.fit`."""
        running, trainer = self.running_job, self.running_job.trainer
        gate, step = running.gate, running.signals.step + 1
        rest = [s for s in running.alive.stages() if s != ACTOR_GENERATE]
        with quiet(), gate.step():
            self._asked.clear()
            with gate.stages(ACTOR_GENERATE):
                served = self._versions()
                start_s = time.monotonic()
                samples = trainer.samples_generator.generate_samples(**trainer.generate_kwargs)[0]
                generation_s = time.monotonic() - start_s
            with gate.stages(*rest):
                status, done = trainer.train_step(samples, step)
            status["timing/generation"] = generation_s
            status["timing/step_total"] = sum(
                seconds for key, seconds in status.items() if key.startswith("timing/")
            )
            trainer.save_logs_and_checkpoints(done, status, {})
        self._trained.append(self._given())
        answered = sorted(p for sample in samples for p in sample.prompts)
        if answered != sorted(self._asked):
            raise AssertionError(f"asked {sorted(self._asked)}, trained on {answered}")
        return StepResult(
            step=step,
            losses={m: status[key] for m, key in _LOSSES.items() if key in status},
            sample_ids=tuple(self._numbers[text] for text in self._asked),
            weight_version=served,
            grad_norms={"actor": status["actor_grad_norm"]},
        )

    def _given(self) -> dict[str, Array]:
        assert self._adapter is not None
        return harness_look.given(self.running_job, self._adapter._linking)

    def _versions(self) -> dict[UnitId, int]:
        """Tell, by its own weights, which of the actor's weights each engine serves; -1: none."""
        found = {}
        for unit in self.running_job.alive.of(ACTOR_GENERATE):
            mine = self._held(unit)
            same = (
                number
                for number, theirs in enumerate(self._trained)
                if all(mine[key].tobytes() == value.tobytes() for key, value in theirs.items())
            )
            found[unit.id] = max(same, default=-1)
        return found

    def running(self, stage: ModelStage) -> AbstractContextManager[None]:
        """Hold a step in flight inside a stage."""
        return self.running_job.gate.stepping(self.step, stage, WAIT_S)

    # --- Looking behind -------------------------------------------------------------------------

    def peek(self, unit: UnitId) -> Mapping[str, Array]:
        """Return the whole tensors of a unit, wherever they lie now."""
        with quiet():
            return self._held(self.running_job.alive[unit])

    def _held(self, unit: Unit) -> dict[str, Array]:
        assert self._adapter is not None
        return harness_look.held(self.running_job, self._adapter._linking, unit)

    def memory_bytes(self, device: Device) -> int:
        """Bytes of weights, masters and moments on a device."""
        return harness_look.resident_bytes(self.running_job, device)

    # --- Harm -----------------------------------------------------------------------------------

    def disturb(self, unit: UnitId, tensor: str) -> None:
        """Add one to a moment, where the ranks of a unit keep it."""
        slot, _, name = tensor.partition("/")
        if unit.model_stage.stage is not Stage.TRAIN or slot == "param":
            raise Unsupported(f"disturbing {tensor} of {unit}", "only moments are kept on a unit")
        running = self.running_job
        handles = [running.ranks[unit.model_stage, d] for d in running.alive[unit].devices]
        ask(handles, harness_behind.disturbed, slot, name, awaited=f"ranks of {unit}",
            timeout_s=WAIT_S)  # fmt: skip

    def fail(self, device: Device) -> None:
        """Kill what runs on a device."""
        running = self.running_job
        for key in [key for key in running.ranks if key[1] == device]:
            ray.kill(running.ranks[key])
        for unit in running.alive.on(device):
            if unit.id in running.engines:
                ray.kill(running.engines[unit.id])

    def fail_at(self, fault: Fault, op_index: int, phase: Phase, device: Device | None) -> None:
        """Refuse: the faults of real jobs are in tests/plugins/openrlhf/faults."""
        raise Unsupported(f"{fault} in {phase}", "the adapter declares no UNIT_LOSS")

    def close(self) -> None:
        """End everything."""
        with quiet():
            ray.shutdown()
            gc.collect()  # Ray drops its own processes without waiting for them, and Python says so
        shutil.rmtree(self._short, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)
