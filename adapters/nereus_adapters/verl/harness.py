"""VerlHarness: the conformance harness over verl's own trainer, driven from the suite's process.

The trainer's real ``fit`` runs on a thread and stands still at the entry of ``on_step_end``, where
the plugin has its boundary, until the suite asks for the next step. What machine and model it runs
on is a `Stand`'s matter, named by ``--harness stand=MODULE``: the accelerators that there are, or
the CPU stand-ins of tests/support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import ray

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl import behind
from nereus_adapters.verl.adapter import VerlAdapter
from nereus_adapters.verl.driven import DEVICES, ROLE_OF, WAIT_S, Running
from nereus_adapters.verl.opening import close_transfers, composed, open_ray, open_transfers
from nereus_adapters.verl.reading import workload_of
from nereus_adapters.verl.waiting import until
from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import ConfigError, Unsupported
from nereus_core.harness import Array, Fault, StepResult, Tier
from nereus_core.model import ModelSpec
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.units import UnitId
from nereus_core.workload import (
    ACTOR_GENERATE,
    FLOAT32,
    Algorithm,
    Job,
    ModelStage,
)

_WIDE = (
    f"trainer.n_gpus_per_node={DEVICES}",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=1",
    "actor_rollout_ref.ref.fsdp_config.fsdp_size=1",
)
"""Every trainer starts on all devices, each of them a whole copy."""
_ASYNC = (
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=1",
)
"""Of an asynchronous job: a batch of prompts is ahead of the trainer, and waits while it trains."""
_LOSSES = {"actor": "actor/loss", "critic": "critic/vf_loss"}


class Stand(Protocol):
    """What a job stands on: made by ``stand()`` of the module that the option names."""

    def arguments(self, algorithm: Algorithm) -> Sequence[str]:
        """Return main_ppo's overrides for a small job; layouts and devices are the harness's.

        4 prompts a step, 2 responses each.
        """
        ...

    @property
    def model(self) -> Path:
        """The folder of its model."""
        ...

    def weights(self, server: Any) -> Mapping[str, Array]:
        """Return what a rollout server computes with, by Hugging Face's names."""
        ...

    def version(self, server: Any) -> int:
        """Return the step whose weights a rollout server has."""
        ...

    def hold(self, servers: Sequence[Any]) -> AbstractContextManager[Callable[[], int]]:
        """Let responses begin in a block, and none end; what it gives counts those begun."""
        ...

    def again(self) -> None:
        """Let servers draw the responses that they drew first."""
        ...

    def ended(self) -> None:
        """Forget what outlives a job: everything of it has been killed."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


class VerlHarness:
    """Launches small verl jobs in one Ray session. Implements `nereus_core.harness.Harness`.

    Args:
        stand: what the jobs stand on; its module has been imported before verl.
        asynchronous: whether every job is, and not those alone that a case wants so.
    """

    tier = Tier.REAL

    def __init__(self, stand: Stand, *, asynchronous: bool = False) -> None:
        self._stand, self._asynchronous = stand, asynchronous
        self._opened = False
        self._job: Running | None = None
        self._kind: tuple[Algorithm, bool] | None = None
        """Algorithm of what runs, and whether it is asynchronous."""
        self._node = "node0"

    @classmethod
    def of(cls, options: Mapping[str, str]) -> VerlHarness:
        """Build it from the options of a run; raises ConfigError for any that it has not."""
        trainer = options.get("trainer", "sync")
        known = set(options) in ({"stand"}, {"stand", "trainer"})
        if not known or trainer not in ("sync", "colocate_async"):
            got = " ".join(f"{key}={value}" for key, value in options.items()) or "nothing"
            raise ConfigError(
                "--harness",
                f"got {got}; expected stand=MODULE, e.g. stand=verl_cpu.stand, and "
                "trainer=sync or colocate_async; sync by default",
            )
        made = import_module(options["stand"]).stand()
        return cls(made, asynchronous=trainer == "colocate_async")

    def job(self, algorithm: Algorithm = "grpo") -> Job:
        """One node of four devices; actor, reference and critic, all in the same processes."""
        self._open()
        spec = ModelSpec.from_hf_config(self._stand.model, name="actor")
        workload = workload_of(algorithm, reference=True, asynchronous=self._asynchronous)
        models = {"actor": spec, "ref": replace(spec, name="ref")}
        if algorithm == "ppo":
            models["critic"] = spec.as_critic("critic")
        devices = tuple(Device(self._node, index) for index in range(DEVICES))
        return Job(
            workload=workload,
            models=models,
            cluster=Cluster(devices, CPU_SEAT, LOOPBACK, LOOPBACK),
            global_batch=8,
            max_prompt_tokens=64,
            max_response_tokens=8,
            precision=FLOAT32,
            micro_batch=2,
            together=(frozenset(workload.stages),),
        )

    def launch(self, job: Job, plan: Plan) -> VerlAdapter:
        """Start verl's trainer once for a kind of job; bring it to a plan, and to its first step.

        The plan is reached from the last one by the adapter's own transition: processes stay. Where
        that fails, everything is started anew: quietly after a case that spoiled the job it had.
        After any other it is a fault of the adapter's, and raised; the next launch starts anew.
        """
        self._open()
        algorithm, asynchronous = kind = (job.workload.algorithm, job.workload.asynchronous)
        usual = replace(self.job(algorithm), workload=job.workload)
        if self._job is not None and self._kind == kind:
            spoiled = self._job.spoiled
            try:
                self._begin(self._job, usual, plan)
            except Exception as error:
                if not spoiled:
                    raise
                print(f"verl is started anew: {type(error).__name__}: {error} ({spoiled})")
        else:
            self._end()
        if self._job is None:
            changes = (*_WIDE, *(_ASYNC if asynchronous else ()))
            self._kind = kind
            self._job = Running(composed(self._stand.arguments(algorithm), changes), usual)
            self._begin(self._job, usual, plan)
        self._stand.again()
        if job != usual:
            self._job.attach(job)
        return self._job.adapter

    @property
    def _running(self) -> Running:
        if self._job is None:
            raise RuntimeError("launch a job first")
        return self._job

    def step(self) -> StepResult:
        """Run one RL step, from where the last one stands to the next ``on_step_end``.

        A weight version is what the server itself says it has (verl's ``global_steps``), not a
        comparison of tensors: at ``on_step_end`` the actor is a step ahead of what served.
        """
        running = self._running
        with running.adapter.gate.step():
            metrics = running.step()
        units = {u.id: u for u in running.adapter.units().of(ACTOR_GENERATE)}
        return StepResult(
            step=int(running.trainer.global_steps) - 1,
            losses={m: float(metrics[key]) for m, key in _LOSSES.items() if key in metrics},
            sample_ids=running.sample_ids,
            weight_version={
                unit: self._stand.version(server)
                for unit, server in running.servers().items()
                if unit in units
            },
            grad_norms={
                m: float(metrics[f"{m}/grad_norm"]) for m in _LOSSES if f"{m}/grad_norm" in metrics
            },
        )

    def running(self, stage: ModelStage) -> AbstractContextManager[None]:
        """Hold one RL step in flight inside a stage."""
        running = self._running
        if stage == ACTOR_GENERATE and running.asynchronous:
            return self._generating()
        return running.adapter.gate.stepping(self.step, stage, WAIT_S)

    def disturb(self, unit: UnitId, tensor: str) -> None:
        """Add one to a tensor on every rank of a unit."""
        assert unit.model_stage != ACTOR_GENERATE, "a server's weights are verl's own copy"
        self._running.moved = True
        self._running.spoiled = f"{tensor} of {unit} was disturbed"
        self._on(unit, behind.disturb, tensor)

    def peek(self, unit: UnitId) -> Mapping[str, Array]:
        """Put a unit's shards together here; a replica is asked for its weights."""
        if unit.model_stage == ACTOR_GENERATE:
            found = self._stand.weights(self._running.servers()[unit])
            return {f"param/{name}": array for name, array in found.items()}
        return behind.assembled(list(self._on(unit, behind.parts).values()), str(unit))

    def memory_bytes(self, device: Device) -> int:
        """Bytes of engines' state on a device, and of the weights of replicas there.

        What a primitive stages lies in host memory, beside the device.
        """
        running, total = self._running, 0
        workers = running.workers()
        if device in workers:
            total = call_all(
                {device: workers[device]}, behind.resident_bytes,
                awaited=f"what lies on {device}", timeout_s=WAIT_S,
            )[device]  # fmt: skip
        for unit, server in running.servers().items():
            devices = running.replica_devices(unit)
            if device in devices:
                held = sum(array.nbytes for array in self._stand.weights(server).values())
                total += held // len(devices)
        return int(total)

    def fail(self, device: Device) -> None:
        """Kill the worker process of a device."""
        self._running.spoiled = f"the process on {device} was killed"
        ray.kill(self._running.workers()[device])

    def fail_at(self, fault: Fault, op_index: int, phase: Phase, device: Device | None) -> None:
        """Refuse: no case asks it of an adapter that does not declare UNIT_LOSS."""
        raise Unsupported(f"a fault {fault} in {phase}", "verl's trainer ends with a lost rank")

    def close(self) -> None:
        """End job, Ray and stand, each whatever becomes of the one before it."""
        with ExitStack() as last_first:
            last_first.callback(self._stand.close)
            if self._opened:
                last_first.callback(ray.shutdown)
                last_first.callback(close_transfers)
            last_first.callback(self._end)

    # --- Within ---------------------------------------------------------------------------------

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Hold a step in flight that waits for samples, with responses begun on the servers.

        The trainer's thread alone would not say that generation goes on: servers go on without it.
        """
        running = self._running
        with ExitStack() as held:
            begun = held.enter_context(self._stand.hold(list(running.servers().values())))
            with running.adapter.gate.stepping(self.step, ACTOR_GENERATE, WAIT_S):
                try:
                    until(begun, "responses to begin", WAIT_S)
                    yield
                    assert begun(), "responses ended that were held"
                finally:
                    held.close()  # the step waits for them

    def _on(self, unit: UnitId, function: Callable[..., Any], *args: Any) -> dict[Device, Any]:
        adapter = self._running.adapter
        devices = adapter.units()[unit].devices
        workers = self._running.workers()
        return call_all(
            {device: workers[device] for device in devices},
            function, ROLE_OF[unit.model_stage], str(unit), *args,
            awaited=f"state of {unit}", timeout_s=WAIT_S,
        )  # fmt: skip

    def _open(self) -> None:
        """Start Ray and verl's transfer queue, as ``main_ppo`` does; once."""
        if self._opened:
            return
        config = composed(self._stand.arguments("grpo"))
        open_ray(config, 2 * DEVICES)
        self._opened = True
        open_transfers(config)
        self._node = ray.util.get_node_ip_address().strip("[]")

    def _begin(self, running: Running, job: Job, plan: Plan) -> None:
        """Bring what runs to a plan and its start; ends it where that fails."""
        try:
            running.begin(job, plan)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self._job is not None:
            job, self._job = self._job, None
            try:
                job.end()
            finally:
                self._stand.ended()
