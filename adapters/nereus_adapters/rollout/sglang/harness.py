"""What the conformance harness knows of SGLang: a tiny Llama on a CPU, engines of one stem."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nereus_adapters.rollout.assembling import Part
from nereus_adapters.rollout.harness import RolloutHarness
from nereus_adapters.rollout.ports import Engine
from nereus_adapters.rollout.sglang import HOOKS
from nereus_adapters.rollout.sglang.calls import Call
from nereus_adapters.rollout.sglang.engine import SglangEngine
from nereus_adapters.rollout.sglang.factory import SglangEngines
from nereus_adapters.rollout.sglang.peeking import parameter_bytes, parts
from nereus_adapters.rollout.sglang.pool import StemPool
from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.layout import Layout

TINY: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
"""A vocabulary that nothing divides; four kv heads, for SGLang shares none among ranks on a CPU."""
_CALL_S = 60.0
"""Longest wait for an engine: far above any answer on a busy machine. Chosen, not measured."""


class Engines(SglangEngines):
    """Remembers which engines are on which device: two while one takes the place of another."""

    def __init__(self, cluster: Cluster, pool: StemPool | None, *, beside: bool) -> None:
        super().__init__(
            TINY,
            cluster.devices,
            max_tokens=1024,
            max_running=16,
            wait_s=_CALL_S,
            pool=pool,
            beside=beside,
        )
        self._made: list[SglangEngine] = []

    def create(self, name: str, layout: Layout, devices: tuple[Device, ...]) -> SglangEngine:
        """Start an engine."""
        engine = super().create(name, layout, devices)
        self._made = [*(e for e in self._made if e.alive), engine]
        return engine

    def on(self, device: Device) -> list[SglangEngine]:
        """Return the engines alive on a device."""
        return [e for e in self._made if e.alive and device in e.devices]


class _Behind:
    """Implements `nereus_adapters.rollout.harness.Behind`."""

    def __init__(self, factory: Engines) -> None:
        self.factory = factory

    def parts(self, engine: Engine) -> Sequence[Mapping[str, Part]]:
        """Ask every rank."""
        assert isinstance(engine, SglangEngine)
        return engine.call_ranks(Call(parts))

    def parameter_bytes(self, device: Device) -> int:
        """Ask the rank on a device; a process that has ended holds nothing."""
        return sum(
            engine.call_ranks(Call(parameter_bytes))[engine.devices.index(device)]
            for engine in self.factory.on(device)
        )

    def kill(self, device: Device) -> None:
        """Kill a rank."""
        self._signal(device, signal.SIGKILL)

    def hang(self, device: Device) -> None:
        """Stop a rank."""
        self._signal(device, signal.SIGSTOP)

    def _signal(self, device: Device, number: signal.Signals) -> None:
        for engine in self.factory.on(device):
            with contextlib.suppress(ProcessLookupError):  # it is ending
                os.kill(engine.pids[engine.devices.index(device)], number)


def new_harness(
    pool: StemPool | None = None, beside: Literal["yes", "no"] = "yes"
) -> RolloutHarness:
    """Return a harness.

    Args:
        pool: of somebody else, who closes it.
        beside: whether new engines may start while those whose place they take still serve.

    Raises:
        ValueError: of another answer.
    """
    if beside not in ("yes", "no"):
        raise ValueError(f"beside is {beside!r}; expected 'yes' or 'no'")
    folder = tempfile.TemporaryDirectory(prefix="nereus-harness-sglang-")
    (Path(folder.name) / "config.json").write_text(json.dumps(dict(TINY)), encoding="utf-8")
    cluster = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
    return RolloutHarness(
        HOOKS.name,
        HOOKS.capabilities,
        folder,
        cluster,
        _Behind(Engines(cluster, pool, beside=beside == "yes")),
    )
