"""SglangEngines: makes engines of one model. Implements `ports.EngineFactory`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nereus_adapters.rollout.hosts import ThisHost
from nereus_adapters.rollout.ports import EngineError
from nereus_adapters.rollout.sglang.calls import TIED
from nereus_adapters.rollout.sglang.engine import SglangEngine
from nereus_adapters.rollout.sglang.pool import StemPool
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec

_NO_EOS: Mapping[str, Any] = {"eos_token_id": None}
"""Responses end at the tokens that a prompt's sampling names, and at no other."""


class SglangEngines:
    """Engines on this machine's devices.

    Args:
        hf_config: of the model, as in a config.json.
        device: ``cpu`` or ``cuda``; a CPU device is a core.
        devices: that engines may be put on.
        dtype: of weights and computation.
        max_tokens: that fit into an engine's cache of keys and values; SGLang's choice when None.
        max_running: most requests decoded at once by an engine.
        arguments: further arguments of `sglang.Engine`.
        wait_s: longest wait for an answer of an engine.
        start_s: longest wait until an engine serves.
        pool: of somebody else, who closes it.
        beside: whether a device has room for two engines while one takes the place of the other.
            By default it does on a CPU alone: on a GPU, an engine takes most of the memory for
            keys and values, unless ``arguments`` say less.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        devices: Collection[Device],
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_tokens: int | None = None,
        max_running: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        wait_s: float = 60.0,
        start_s: float = 180.0,
        pool: StemPool | None = None,
        beside: bool | None = None,
    ) -> None:
        self._beside = device == "cpu" if beside is None else beside
        self._device, self._devices = device, frozenset(devices)
        self._wait_s, self._start_s = wait_s, start_s
        spec = ModelSpec.from_hf_config(hf_config)
        self._kv_heads, self._tied = spec.num_kv_heads, spec.tied_embeddings
        self._owns_pool = pool is None
        self.pool = pool or new_pool(device, start_s=start_s)
        self._folder = tempfile.TemporaryDirectory(prefix="model-", dir=self.pool.folder)
        config = Path(self._folder.name) / "config.json"
        config.write_text(json.dumps({**hf_config, **_NO_EOS}))
        self._arguments = {
            "model_path": self._folder.name,
            "load_format": "dummy",  # an engine serves nothing before its first update
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "device": device,
            "max_total_tokens": max_tokens,
            "max_running_requests": max_running,
            "log_level": "error",
            "skip_server_warmup": True,
            **(_ON_CPU if device == "cpu" else {}),
            **(arguments or {}),
        }

    @property
    def healthy(self) -> frozenset[Device]:
        """Devices an engine may be put on."""
        return self._devices

    @property
    def beside(self) -> bool:
        """Whether an engine may be put on a device where another still is."""
        return self._beside

    @property
    def hosts(self) -> ThisHost:
        """Where weights are read: all devices are of this host."""
        return ThisHost()

    def problem(self, layout: Layout, devices: tuple[Device, ...]) -> str | None:
        """Say why no engine of a layout can be."""
        if self._device == "cpu" and self._kv_heads % layout.tp:
            # On a CPU, SGLang 0.5.23 pads heads (configs/update_config.py) where it repeats them on
            # CUDA: its ranks hold other heads there than anywhere else.
            return f"{self._kv_heads} kv heads are not a multiple of tp={layout.tp}, as a CPU needs"
        return None

    def create(self, name: str, layout: Layout, devices: tuple[Device, ...]) -> SglangEngine:
        """Start an engine without weights."""
        if problem := self.problem(layout, devices):
            raise EngineError(name, "come up", problem)
        leased = self.pool.lease(name, self.arguments(layout), self.environment(devices))
        return SglangEngine(
            leased, self.pool, layout, devices, wait_s=self._wait_s, start_s=self._start_s
        )

    def arguments(self, layout: Layout) -> dict[str, Any]:
        """Return the arguments of `sglang.Engine` for a layout."""
        found = {**self._arguments, "tp_size": layout.tp, "pp_size": layout.pp}
        if self._tied and layout.pp > 1:
            # SGLang 0.5.23 models/llama.py: the last stage of a tied model has no head at all.
            found["json_model_override_args"] = json.dumps(
                {"tie_word_embeddings": False, TIED: True}
            )
        return found

    def environment(self, devices: tuple[Device, ...]) -> dict[str, str]:
        """Return the variables that put an engine on its devices."""
        if self._device != "cpu":
            return {"CUDA_VISIBLE_DEVICES": ",".join(str(d.index) for d in devices)}
        cores = sorted(os.sched_getaffinity(0))
        bound = [str(cores[d.index % len(cores)]) for d in devices]
        return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(bound)}

    def close(self) -> None:
        """End everything it started."""
        self._folder.cleanup()
        if self._owns_pool:
            self.pool.close()


def new_pool(device: str = "cpu", *, start_s: float = 180.0) -> StemPool:
    """Return a pool whose stem is for a kind of device; nothing is started yet."""
    return StemPool(CPU_ENVIRONMENT if device == "cpu" else {}, start_s=start_s)


CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}
_ON_CPU: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # ranks that wait do not spin on the core of another
    "watchdog_timeout": 600,
}
"""SGLang 0.5.23 on a CPU without its kernels: what runs on torch alone."""
