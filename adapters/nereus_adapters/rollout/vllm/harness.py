"""The conformance harness: a tiny Llama in float32 on vLLM, on four seats that stay warm."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nereus_adapters.rollout.assembling import Part
from nereus_adapters.rollout.harness import RolloutHarness
from nereus_adapters.rollout.ports import Engine
from nereus_adapters.rollout.vllm import HOOKS
from nereus_adapters.rollout.vllm.engine import VllmEngine
from nereus_adapters.rollout.vllm.factory import VllmFactory
from nereus_adapters.rollout.vllm.seats import SeatPool
from nereus_adapters.rollout.vllm.settings import VllmSettings
from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec

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
_WAIT_S = 60.0
"""Far above any step here; chosen, not measured."""


class CpuFactory(VllmFactory):
    """Engines whose pipelines work on a CPU."""

    def create(self, name: str, layout: Layout, devices: tuple[Device, ...]) -> VllmEngine:
        """Start an engine, and give its pipeline stages what vLLM forgets on a CPU."""
        engine = super().create(name, layout, devices)
        if layout.pp > 1:
            try:
                engine.rpc("nereus_receive_buffer")
            except BaseException:
                engine.close()
                raise
        return engine


def settings(model: Path, **changes: Any) -> VllmSettings:
    """Return how the harness's engines start: small, and at once."""
    small = VllmSettings(
        model,
        max_tokens=128,
        max_running=16,
        kv_cache_bytes=8 * 2**20,
        eager=True,
        extension="nereus_adapters.rollout.vllm.harness_cpu.CpuExtension",
    )
    return replace(small, **changes)


class Behind:
    """Implements `nereus_adapters.rollout.harness.Behind`."""

    def __init__(self, factory: CpuFactory) -> None:
        self.factory = factory

    def parts(self, engine: Engine) -> Sequence[Mapping[str, Part]]:
        """Ask every rank."""
        assert isinstance(engine, VllmEngine)
        return engine.rpc("nereus_peek")

    def parameter_bytes(self, device: Device) -> int:
        """Ask the seat; one that is not there holds nothing."""
        pool = self.factory.pool
        if device not in pool.alive:
            return 0
        found: int = pool.seat(device).call("memory", _WAIT_S)[1]
        return found

    def kill(self, device: Device) -> None:
        """Kill a seat."""
        self.factory.pool.kill(device)

    def hang(self, device: Device) -> None:
        """Stop a seat."""
        os.kill(self.factory.pool.seat(device).pid, signal.SIGSTOP)


def new_harness(
    pool: SeatPool | None = None, front: Literal["step", "async"] = "step"
) -> RolloutHarness:
    """Return a harness.

    Args:
        pool: seats of somebody else, who closes them.
        front: who steps the schedulers.

    Raises:
        ValueError: of another front.
    """
    if front not in ("step", "async"):
        raise ValueError(f"front is {front!r}; expected 'step' or 'async'")
    folder = tempfile.TemporaryDirectory(prefix="nereus-harness-vllm-")
    model = write_model(Path(folder.name))
    cluster = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
    spec = ModelSpec.from_hf_config(model, name="actor")
    factory = CpuFactory(settings(model, front=front), spec, cluster.devices, pool=pool)
    factory.pool.start(cluster.devices)
    behind = Behind(factory)
    return RolloutHarness(HOOKS.name, HOOKS.capabilities, folder, cluster, behind, wait_s=_WAIT_S)


def write_model(folder: Path, config: Mapping[str, object] = TINY) -> Path:
    """Write a config.json; engines read no weights from disk."""
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return folder
