"""RolloutHarness: the conformance harness of every rollout engine, given what is its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from nereus_adapters.rollout.adapter import RolloutAdapter
from nereus_adapters.rollout.assembling import Part, assembled
from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.rollout.loop import Loop
from nereus_adapters.rollout.ports import Engine, EngineFactory
from nereus_adapters.rollout.segment import path
from nereus_adapters.rollout.trainer import HfTrainer
from nereus_core.capabilities import Capabilities
from nereus_core.cluster import Cluster, Device
from nereus_core.errors import OutOfDeviceMemory
from nereus_core.harness import Array, Fault, StepResult, Tier
from nereus_core.model import ModelSpec
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.primitives import Primitive, touched
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ALGORITHMS, FLOAT32, Algorithm, Job, ModelStage

_SEED = 0


class Behind(Protocol):
    """An engine's own ways, for looking behind the ports and for doing harm."""

    @property
    def factory(self) -> EngineFactory:
        """Makes the engines."""
        ...

    def parts(self, engine: Engine) -> Sequence[Mapping[str, Part]]:
        """Return what each rank computes with: ``param/tensor`` -> offset in it, values."""
        ...

    def parameter_bytes(self, device: Device) -> int:
        """Bytes of parameters that engines hold on a device, asked there."""
        ...

    def kill(self, device: Device) -> None:
        """End the process of a device, without notice."""
        ...

    def hang(self, device: Device) -> None:
        """Stop the process of a device: it answers no more."""
        ...


class RolloutHarness:
    """Launches small jobs on four devices that stay. Implements `nereus_core.harness.Harness`.

    Args:
        name: of the adapter.
        capabilities: what it declares.
        folder: with the config.json of a small Llama.
        cluster: of four devices.
        behind: the engine's own ways.
        wait_s: longest wait for a response or a boundary.
    """

    tier = Tier.REAL

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        folder: tempfile.TemporaryDirectory[str],
        cluster: Cluster,
        behind: Behind,
        *,
        wait_s: float = 60.0,
    ) -> None:
        self._name, self._capabilities, self._cluster = name, capabilities, cluster
        self._folder, self._wait_s = folder, wait_s
        self.behind = behind
        self._spec = ModelSpec.from_hf_config(Path(folder.name), name="actor")
        self._running: RolloutJob | None = None
        self._loop: Loop | None = None
        self._trainer: HfTrainer | None = None
        self._adapter: RolloutAdapter | None = None

    def job(self, algorithm: Algorithm = "grpo") -> Job:
        """One node of four devices, a small model, a batch of eight."""
        critic = {"critic": self._spec.as_critic("critic")} if algorithm == "ppo" else {}
        return Job(
            workload=ALGORITHMS[algorithm](),
            models={"actor": self._spec, "ref": replace(self._spec, name="ref"), **critic},
            cluster=self._cluster,
            global_batch=8,
            max_prompt_tokens=8,
            max_response_tokens=8,
            precision=FLOAT32,
        )

    def launch(self, job: Job, plan: Plan) -> RolloutAdapter:
        """Start a job with seed 0; engines of the last one go on where they fit."""
        engines: list[Engine] = []
        if self._running is not None:
            engines = self._running.release()
        self._trainer = HfTrainer(job, plan, Path(self._folder.name), seed=_SEED, max_devices=4)
        self._running = RolloutJob(
            job, plan, self.behind.factory, self._trainer, engines=engines, wait_s=self._wait_s
        )
        self._loop = Loop(self._running, self._trainer, wait_s=self._wait_s)
        self._adapter = RolloutAdapter(self._name, self._capabilities, self._running, None)
        return self._adapter

    @property
    def running_job(self) -> RolloutJob:
        """The job launched last."""
        if self._running is None:
            raise RuntimeError("launch a job first")
        return self._running

    @property
    def trainer(self) -> HfTrainer:
        """Its trainer."""
        if self._trainer is None:
            raise RuntimeError("launch a job first")
        return self._trainer

    def step(self) -> StepResult:
        """Run one step."""
        assert self._loop is not None
        return self._loop.step()

    def running(self, stage: ModelStage) -> AbstractContextManager[None]:
        """Hold a step in flight inside a stage."""
        return self.running_job.gate.stepping(self.step, stage, self._wait_s)

    def disturb(self, unit: UnitId, tensor: str) -> None:
        """Add one to a tensor of a unit of another stage than generate, on all its ranks."""
        assert unit.model_stage != ACTOR_GENERATE, "an engine's weights cannot be written"
        self.trainer.disturb(unit, tensor)

    def peek(self, unit: UnitId) -> Mapping[str, Array]:
        """Put a unit's parts together on the driver: ``slot/tensor`` -> whole array."""
        if unit.model_stage != ACTOR_GENERATE:
            return self.trainer.whole(unit)
        ranks = self.behind.parts(self.running_job.fleet.engine(unit))
        stage = unit.model_stage
        return assembled(self.running_job.job.model(stage), stage.stage, ranks)

    def memory_bytes(self, device: Device) -> int:
        """Bytes of parameters on a device, and of the trainer's state there."""
        return self.trainer.held_bytes(device) + self.behind.parameter_bytes(device)

    def fail(self, device: Device) -> None:
        """Kill what runs on a device, and say that it is gone."""
        self.behind.kill(device)
        self.running_job.fail(device)

    def fail_at(self, fault: Fault, op_index: int, phase: Phase, device: Device | None) -> None:
        """Arm a fault."""
        assert self._adapter is not None
        self._adapter.fault = _Strike(self, fault, op_index, phase, device)

    def corrupt(self) -> None:
        """Change a byte of the newest weights in shared memory."""
        published = self.running_job.supply.store.get(self.trainer.version)
        piece = published.pieces[len(published.pieces) // 2]
        with path(piece.segment).open("r+b") as content:
            content.seek(piece.offset)
            byte = content.read(1)
            content.seek(piece.offset)
            content.write(bytes([byte[0] ^ 0x55]))

    def close(self) -> None:
        """End everything."""
        if self._running is not None:
            self._running.close()
        self.behind.factory.close()
        self._folder.cleanup()


class _Strike:
    """Lets a fault happen once, as a phase of the n-th primitive begins."""

    def __init__(
        self, harness: RolloutHarness, fault: Fault, index: int, phase: Phase, device: Device | None
    ) -> None:
        self._harness, self._fault = harness, fault
        self._at, self._device = (index, phase), device
        self._order: list[str] = []

    def __call__(self, op: Primitive, phase: Phase, units: UnitMap) -> None:
        if op.op_id not in self._order:
            self._order.append(op.op_id)
        if (self._order.index(op.op_id), phase) != self._at:
            return
        self._at = (-1, phase)
        device = self._device or min(touched(op, units))
        match self._fault:
            case Fault.KILL:
                self._harness.fail(device)
            case Fault.HANG:
                self._harness.behind.hang(device)
            case Fault.REFUSE_MEMORY:
                raise OutOfDeviceMemory(str(op), device, 2, 1)
            case Fault.CORRUPT:
                self._harness.corrupt()
