"""The conformance harness over the simulated world."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from nereus_adapters.sim.adapter import SimAdapter, logical
from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.harness import Fault, StepResult, Tier
from nereus_core.model import ModelSpec
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.sim.faults import Strike
from nereus_core.sim.job import SimJob
from nereus_core.sim.pace import Script
from nereus_core.sim.world import Array
from nereus_core.state import Slot
from nereus_core.units import UnitId
from nereus_core.workload import ALGORITHMS, FLOAT64, Algorithm, Job, ModelStage

SMALL = ModelSpec("small", "llama", 4, 16, 32, 4, 2, 4, 37, tied_embeddings=True)
"""4 heads over 2 kv heads, tied embeddings, a vocabulary that 4 does not divide."""
_WAIT_S = 20.0
"""Far above any step here; chosen, not measured."""


class SimHarness:
    """Launches small jobs in memory. Implements `nereus_core.harness.Harness`.

    Args:
        together: all stages hold the same devices, as in a framework that has them in the same
            processes.
    """

    tier = Tier.CONTRACT
    wait_s = _WAIT_S
    """Most seconds a step waits for a boundary to close."""

    def __init__(self, *, together: bool = False) -> None:
        self._together = together
        self._running: SimJob | None = None
        self._adapter: SimAdapter | None = None
        self._strike: Strike | None = None

    def job(self, algorithm: Algorithm = "grpo") -> Job:
        """One node of four devices, a model of ten thousand parameters, a batch of eight."""
        critic = {"critic": SMALL.as_critic("small-critic")} if algorithm == "ppo" else {}
        workload = ALGORITHMS[algorithm]()
        return Job(
            workload=workload,
            models={"actor": SMALL, "ref": SMALL, **critic},
            cluster=Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK),
            global_batch=8,
            max_prompt_tokens=8,
            max_response_tokens=32,
            precision=FLOAT64,
            together=(frozenset(workload.stages),) if self._together else (),
        )

    def launch(self, job: Job, plan: Plan) -> SimAdapter:
        """Start a job with seed 0."""
        self.close()
        script = Script(seed=0, response_tokens=lambda step: 16.0 + step)
        self._running = SimJob(job, plan, script=script, wait_s=self.wait_s)
        self._adapter = SimAdapter(self._running)
        return self._adapter

    @property
    def running_job(self) -> SimJob:
        """The job launched last."""
        if self._running is None:
            raise RuntimeError("launch a job first")
        return self._running

    def step(self) -> StepResult:
        """Run one RL step."""
        return self.running_job.step()

    def running(self, stage: ModelStage) -> AbstractContextManager[None]:
        """Hold a step in flight inside a stage."""
        job = self.running_job
        return job.gate.stepping(job.step, stage, _WAIT_S)

    def disturb(self, unit: UnitId, tensor: str) -> None:
        """Add one to a tensor of one unit."""
        slot, _, name = tensor.partition("/")
        for store in self.running_job.live(unit).stores:
            if name in store.shard:
                store.arrays[Slot(slot), name][...] += 1

    def peek(self, unit: UnitId) -> Mapping[str, Array]:
        """Return the whole logical state of a unit, copied."""
        return logical(self.running_job.live(unit), self.running_job.job)

    def memory_bytes(self, device: Device) -> int:
        """Bytes of the arrays on a device."""
        return self.running_job.world.used_bytes(device)

    def fail(self, device: Device) -> None:
        """Lose a device."""
        self.running_job.fail(device)

    def fail_at(self, fault: Fault, op_index: int, phase: Phase, device: Device | None) -> None:
        """Arm a fault."""
        job = self.running_job
        assert self._adapter is not None
        self._strike = Strike(job, fault, op_index, phase, device)
        self._adapter.fault = self._strike.at

    def close(self) -> None:
        """Forget the job, and let go of what hangs."""
        if self._strike is not None:
            self._strike.let_go()
        self._running = self._adapter = self._strike = None
