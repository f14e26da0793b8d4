"""The conformance harness of the toy adapter: how the suite launches a job and looks behind it."""

# ruff: noqa: D102  (the protocols that these classes implement document their methods)
from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nereus_toy import ToyAdapter
from toy_framework import WAIT_S, ToyTrainer

from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.harness import Array, Fault, StepResult, Tier
from nereus_core.model import ModelSpec
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.units import UnitId
from nereus_core.workload import ALGORITHMS, FLOAT64, Algorithm, Job, ModelStage

MODEL = ModelSpec("toy", "llama", 4, 16, 32, 4, 2, 4, 40)


class ToyHarness:
    """Implements `nereus_core.harness.Harness`."""

    tier = Tier.CONTRACT
    trainer: ToyTrainer

    def job(self, algorithm: Algorithm = "grpo") -> Job:
        models = {"actor": MODEL, "ref": MODEL, "critic": MODEL.as_critic("toy-critic")}
        cluster = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
        return Job(ALGORITHMS[algorithm](), models, cluster, 8, 4, 4, FLOAT64)

    def launch(self, job: Job, plan: Plan) -> ToyAdapter:
        self.trainer = ToyTrainer(job, plan)
        return ToyAdapter(self.trainer)

    def step(self) -> StepResult:
        return self.trainer.step()

    @contextmanager
    def running(self, stage: ModelStage) -> Iterator[None]:
        gate = self.trainer.gate
        gate.stop_at(stage)
        thread = threading.Thread(target=self.trainer.step)
        thread.start()
        try:
            gate.wait_stopped()
            yield
        finally:
            gate.go_on()
            thread.join(WAIT_S)

    def disturb(self, unit: UnitId, tensor: str) -> None:
        self.trainer.replicas[unit].tensors[tensor] += 1

    def peek(self, unit: UnitId) -> Mapping[str, Array]:
        return {k: v.copy() for k, v in self.trainer.replicas[unit].tensors.items()}

    def memory_bytes(self, device: Device) -> int:
        return self.trainer.memory_bytes(device)

    def fail(self, device: Device) -> None:
        raise NotImplementedError("toy devices do not fail: UNIT_LOSS is declared unsupported")

    def fail_at(self, fault: Fault, op_index: int, phase: Phase, device: Device | None) -> None:
        raise NotImplementedError("toy devices have no faults: UNIT_LOSS is declared unsupported")

    def close(self) -> None:
        pass
