"""The conformance harness: a tiny Llama in float32 on vLLM, on four seats that stay warm."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus_adapters.rollout.adapter import RolloutAdapter
from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.rollout.loop import Loop
from nereus_adapters.rollout.ports import Engine
from nereus_adapters.rollout.trainer import HfTrainer, assembled
from nereus_adapters.rollout.vllm import CAPABILITIES, NAME
from nereus_adapters.rollout.vllm.engine import VllmEngine, VllmFactory, VllmSettings
from nereus_adapters.rollout.vllm.seats import SeatPool
from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import OutOfDeviceMemory
from nereus_core.harness import Array, Fault, StepResult, Tier
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.primitives import Primitive, touched
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ALGORITHMS, FLOAT32, Algorithm, Job, ModelStage

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
"""vLLM's attention on a CPU needs heads of 32; the spread keeps greedy tokens apart."""
_SEED = 0
_WAIT_S = 60.0
"""Far above any step here; chosen, not measured."""


class CpuFactory(VllmFactory):
    """Engines whose pipelines work on a CPU."""

    def create(self, name: str, layout: Layout, devices: tuple[Device, ...]) -> VllmEngine:
        """Start an engine, and give its pipeline stages what vLLM forgets on a CPU."""
        engine = super().create(name, layout, devices)
        if layout.pp > 1:
            engine.rpc("nereus_receive_buffer")
        return engine


def settings(model: Path, **changes: Any) -> VllmSettings:
    """Return how the harness's engines start: small, and at once."""
    small = VllmSettings(
        model,
        max_tokens=64,
        max_running=16,
        kv_cache_bytes=8 * 2**20,
        eager=True,
        extension="nereus_adapters.rollout.vllm.harness_cpu.CpuExtension",
    )
    return replace(small, **changes)


class VllmHarness:
    """Launches small jobs. Implements `nereus_core.harness.Harness`.

    Args:
        pool: seats of somebody else, who closes them.
    """

    tier = Tier.REAL

    def __init__(self, pool: SeatPool | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nereus-vllm-harness-")
        self._model = write_model(Path(self._folder.name))
        spec = ModelSpec.from_hf_config(self._model, name="actor")
        self._cluster = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
        devices = self._cluster.devices
        self.factory = CpuFactory(settings(self._model), spec, devices, pool=pool)
        self.factory.pool.start(devices)
        self._spec = spec
        self._running: RolloutJob | None = None
        self._loop: Loop | None = None
        self._trainer: HfTrainer | None = None
        self._adapter: RolloutAdapter | None = None

    def job(self, algorithm: Algorithm = "grpo") -> Job:
        """One node of four devices, a model of 0.6 M parameters, a batch of eight."""
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
        self._trainer = HfTrainer(job, plan, self._model, seed=_SEED, max_devices=4)
        self._running = RolloutJob(
            job, plan, self.factory, self._trainer, engines=engines, wait_s=_WAIT_S
        )
        self._loop = Loop(self._running, self._trainer, wait_s=_WAIT_S)
        self._adapter = RolloutAdapter(NAME, CAPABILITIES, self._running, None)
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
        return self.running_job.gate.stepping(self.step, stage, _WAIT_S)

    def disturb(self, unit: UnitId, tensor: str) -> None:
        """Add one to a tensor of a unit of another stage than generate, on all its ranks."""
        assert unit.model_stage != ACTOR_GENERATE, "an engine's weights cannot be written"
        self.trainer.disturb(unit, tensor)

    def peek(self, unit: UnitId) -> Mapping[str, Array]:
        """Put a unit's parts together on the driver: ``slot/tensor`` -> whole array."""
        if unit.model_stage != ACTOR_GENERATE:
            return self.trainer.whole(unit)
        ranks = self._engine(unit).rpc("nereus_peek")
        stage = unit.model_stage
        return assembled(self.running_job.job.model(stage), stage.stage, ranks)

    def memory_bytes(self, device: Device) -> int:
        """Bytes of parameters in a seat's process, and of the trainer's state on the device."""
        held = self.trainer.held_bytes(device)
        pool = self.factory.pool
        if device in pool.alive:
            held += pool.seat(device).call("memory", _WAIT_S)[1]
        return held

    def fail(self, device: Device) -> None:
        """Kill a seat, and say that its device is gone."""
        self.factory.pool.kill(device)
        self.running_job.fail(device)

    def fail_at(self, fault: Fault, op_index: int, phase: Phase, device: Device | None) -> None:
        """Arm a fault."""
        assert self._adapter is not None
        self._adapter.fault = _Strike(self, fault, op_index, phase, device)

    def corrupt(self) -> None:
        """Change a byte of the newest weights in shared memory."""
        published = self.running_job.store.get(self.trainer.version)
        piece = published.pieces[len(published.pieces) // 2]
        path = Path("/dev/shm") / piece.segment
        with path.open("r+b") as content:
            content.seek(piece.offset)
            byte = content.read(1)
            content.seek(piece.offset)
            content.write(bytes([byte[0] ^ 0x55]))

    def close(self) -> None:
        """End everything."""
        if self._running is not None:
            self._running.close()
        self.factory.close()
        self._folder.cleanup()

    def _engine(self, unit: UnitId) -> VllmEngine:
        engine = self.running_job.fleet.engine(unit)
        assert isinstance(engine, VllmEngine)
        return engine


class _Strike:
    """Lets a fault happen once, as a phase of the n-th primitive begins."""

    def __init__(
        self, harness: VllmHarness, fault: Fault, index: int, phase: Phase, device: Device | None
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
                os.kill(self._harness.factory.pool.seat(device).pid, signal.SIGSTOP)
            case Fault.REFUSE_MEMORY:
                raise OutOfDeviceMemory(str(op), device, 2, 1)
            case Fault.CORRUPT:
                self._harness.corrupt()


def write_model(folder: Path, config: Mapping[str, object] = TINY) -> Path:
    """Write a config.json; engines read no weights from disk."""
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return folder
