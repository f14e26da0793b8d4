"""The conformance harness: a tiny Llama in float64 on four seats that stay warm."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nereus_adapters.torch.adapter import TorchAdapter
from nereus_adapters.torch.config import BackendSection
from nereus_adapters.torch.engine import OptimizerSpec, export_model
from nereus_adapters.torch.fleet import Pool
from nereus_adapters.torch.job import TorchJob
from nereus_adapters.torch.pools import open_pool
from nereus_adapters.torch.rl.tasks import CopyTask
from nereus_adapters.torch.settings import RlSettings
from nereus_adapters.torch.setup import simplest
from nereus_adapters.torch.strikes import Strike
from nereus_adapters.torch.values import ModelSource
from nereus_core.cluster import Cluster, Device
from nereus_core.config import validated
from nereus_core.device_specs import CPU_SEAT, H200_SXM, LOOPBACK, NVLINK4
from nereus_core.harness import Array, Fault, StepResult, Tier
from nereus_core.model import ModelSpec
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.state import Slot, tensor_rules
from nereus_core.units import UnitId
from nereus_core.workload import ALGORITHMS, FLOAT64, Algorithm, Job, ModelStage

TINY_CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
"""4 heads over 2 kv heads, tied embeddings, a vocabulary that 4 does not divide."""
_SEED = 0
_HANG_S = 6.0
"""Longest wait for a seat while one is to hang: above any phase on a busy machine. Chosen."""
_WAIT_S = 60.0
"""Far above any step here; chosen, not measured."""


class TorchHarness:
    """Launches tiny jobs. Implements `nereus_core.harness.Harness`.

    Args:
        device: ``cpu`` (tier real) or ``cuda`` (tier gpu, four devices).
        hf_config: of the model, as in a config.json.
        pool: seats of somebody else, who closes them.
        pool_kind: ``local`` or ``ray``, where seats are the harness's own.
        wait_s: longest wait for a stage of a step or a phase of a transfer: what a hang costs.
    """

    def __init__(
        self,
        device: Literal["cpu", "cuda"] = "cpu",
        hf_config: Mapping[str, Any] = TINY_CONFIG,
        pool: Pool | None = None,
        pool_kind: str = "local",
        wait_s: float = _WAIT_S,
    ) -> None:
        self.tier = Tier.REAL if device == "cpu" else Tier.GPU
        self._device, self._hf_config, self._wait_s = device, hf_config, wait_s
        self._owns_pool = pool is None
        self._cluster = _cluster(device)
        # Of its own: a cluster that this machine happens to run is somebody's.
        section = {"pool": pool_kind, "device": device, "address": "local"}
        backend = validated(BackendSection, section, at="backend")
        self.pool = pool or open_pool(backend, self._cluster)
        self.pool.require(4)
        self._folder = tempfile.TemporaryDirectory(prefix="nereus-harness-")
        self._model = export_model(hf_config, Path(self._folder.name) / "tiny", seed=_SEED)
        self._running: TorchJob | None = None
        self._adapter: TorchAdapter | None = None

    def job(self, algorithm: Algorithm = "grpo") -> Job:
        """One node of four devices, a model of fifty thousand parameters, a batch of eight."""
        spec = ModelSpec.from_hf_config(self._hf_config, name="actor")
        critic = {"critic": spec.as_critic("critic")} if algorithm == "ppo" else {}
        return Job(
            workload=ALGORITHMS[algorithm](),
            models={"actor": spec, "ref": replace(spec, name="ref"), **critic},
            cluster=self._cluster,
            global_batch=8,
            max_prompt_tokens=8,
            max_response_tokens=8,
            precision=FLOAT64,
            micro_batch=2,
        )

    def launch(self, job: Job, plan: Plan) -> TorchAdapter:
        """Start a job with seed 0; seats are reused."""
        return self._start(job, plan, None)

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the job."""
        self.running_job.save(folder)

    def resume(self, folder: Path) -> TorchAdapter:
        """Start the harness's job from a checkpoint, in the simplest plan on two devices."""
        job = self.job()
        few = job.on(job.cluster.without(job.cluster.devices[2:]))
        return self._start(job, simplest(few), folder)

    def take_over(self) -> TorchAdapter:
        """Go on with the harness's job where the pool's seats are, under a driver before."""
        return self._start(self.job(), None, None)

    def _start(self, job: Job, plan: Plan | None, resume: Path | None) -> TorchAdapter:
        self._end()
        copies = 2 if job.workload.algorithm == "grpo" else 1
        self._running = TorchJob(
            job,
            plan,
            self.sources(job),
            CopyTask(
                job.models["actor"].vocab,
                _SEED,
                job.global_batch // copies,
                (3, min(6, job.max_prompt_tokens)),
                job.max_response_tokens,
            ),
            RlSettings(
                seed=_SEED,
                responses_per_prompt=copies,
                step_s=self._wait_s,
                transfer_s=self._wait_s,
                boundary_s=_WAIT_S,
            ),
            self.pool,
            owns_pool=False,
            resume=resume,
        )
        self._adapter = TorchAdapter(self._running)
        return self._adapter

    def sources(self, job: Job) -> dict[str, ModelSource]:
        """Return the models of a job; learning rates large enough that a few steps show."""
        optimizer = OptimizerSpec(lr=1e-2, warmup_steps=2)
        return {
            model: ModelSource(
                spec,
                self._hf_config,
                str(self._model),
                job.precision.compute,
                optimizer if model != "ref" else None,
            )
            for model, spec in job.models.items()
        }

    @property
    def running_job(self) -> TorchJob:
        """The job launched last."""
        if self._running is None:
            raise RuntimeError("launch a job first")
        return self._running

    def step(self) -> StepResult:
        """Run one RL step."""
        job = self.running_job
        job.step()
        rollout, copies = job.last, job.settings.responses_per_prompt
        assert rollout is not None
        return StepResult(
            step=rollout.step,
            losses={model: m.loss for model, m in rollout.metrics.items()},
            # Several responses to one prompt are as many samples.
            sample_ids=tuple(p.id * copies + i % copies for i, p in enumerate(rollout.prompts)),
            weight_version=dict(job.served),
            grad_norms={model: m.grad_norm for model, m in rollout.metrics.items()},
        )

    def running(self, stage: ModelStage) -> AbstractContextManager[None]:
        """Hold a step in flight inside a stage."""
        job = self.running_job
        return job.gate.stepping(job.step, stage, _WAIT_S)

    def disturb(self, unit: UnitId, tensor: str) -> None:
        """Add one to a tensor of one unit, on all its ranks."""
        slot, _, name = tensor.partition("/")
        self._ask(unit, "poke", slot=Slot(slot), name=name, factor=1.0, term=1.0)

    def scale(self, unit: UnitId, tensor: str, factor: float) -> None:
        """Multiply a tensor of one unit, on all its ranks."""
        slot, _, name = tensor.partition("/")
        self._ask(unit, "poke", slot=Slot(slot), name=name, factor=factor, term=0.0)

    def peek(self, unit: UnitId) -> Mapping[str, Array]:
        """Put a unit's shards together on the driver: ``slot/tensor`` -> whole array."""
        job = self.running_job
        parts = self._ask(unit, "peek")
        spec = job.job.model(unit.model_stage)
        whole: dict[str, Array] = {}
        for rule in tensor_rules(spec):
            for slot in job.item_bytes(unit.model_stage.stage):
                key = f"{slot}/{rule.name}"
                whole[key] = _assembled(key, rule.shape, parts)
        return whole

    def memory_bytes(self, device: Device) -> int:
        """Bytes of all tensor storages that live in a seat's process."""
        found: int = self.pool.call(device, "measured_bytes").wait(_WAIT_S).value
        return found

    def fail(self, device: Device) -> None:
        """Kill a seat."""
        self.pool.kill(device)

    def fail_at(self, fault: Fault, op_index: int, phase: Phase, device: Device | None) -> None:
        """Arm a fault; while a hang is, waits are short, as they are what it costs."""
        assert self._adapter is not None
        if fault is Fault.HANG:
            running = self.running_job
            running.settings = replace(running.settings, transfer_s=_HANG_S)
            running.fleet.timeout_s = _HANG_S
        self._adapter.fault = Strike(self.pool, fault, op_index, phase, device).at

    def close(self) -> None:
        """End the job, and the seats where they are the harness's own."""
        self._end()
        if self._owns_pool:
            self.pool.close()
        self._folder.cleanup()

    def _end(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.close()

    def _ask(self, unit: UnitId, method: str, **kwargs: object) -> list[Any]:
        fleet = self.running_job.fleet
        answers = fleet.settle(fleet.send({unit: kwargs}, method), _WAIT_S)
        return [a.value for a in answers]


def _cluster(device: str) -> Cluster:
    """One node of four devices."""
    spec, link = (CPU_SEAT, LOOPBACK) if device == "cpu" else (H200_SXM, NVLINK4)
    return Cluster.homogeneous(1, 4, spec, link, link)


def _assembled(key: str, shape: tuple[int, ...], parts: list[Any]) -> Array:
    """Lay ranks' boxes into one array; what two ranks hold must be equal to the bit."""
    whole: Array | None = None
    seen = np.zeros(shape, bool)
    for rank, part in enumerate(parts):
        if key not in part:
            continue
        offset, values = part[key]
        if whole is None:
            whole = np.zeros(shape, values.dtype)
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        twice = seen[place]
        if not np.array_equal(whole[place][twice], values[twice]):
            raise AssertionError(f"{key}: rank {rank} differs from a rank before it")
        whole[place], seen[place] = values, True
    if whole is None or not seen.all():
        raise AssertionError(f"{key}: ranks do not hold all of it")
    return whole
