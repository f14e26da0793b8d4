"""VllmSettings: how engines are started, and what their processes find in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

EXTENSION = "nereus_adapters.rollout.vllm.extension.Extension"
CPU_ENV = {
    # Threads are the operating system's business where several seats share a machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
SEAT_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def environment(accelerator: str) -> dict[str, str]:
    """Return the variables of seats."""
    return {**SEAT_ENV, **(CPU_ENV if accelerator == "cpu" else {})}


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How engines are started."""

    model: Path
    """Folder with a config.json; its weights are not read."""
    dtype: str = "float32"
    max_tokens: int = 2048
    """Longest prompt and response together (vLLM's max_model_len)."""
    max_running: int = 64
    """Most requests decoded at once (vLLM's max_num_seqs)."""
    kv_cache_bytes: int | None = None
    """Per device; None lets vLLM take what it is allowed to."""
    eager: bool = False
    """Whether vLLM compiles nothing: starts faster, decodes slower."""
    executor: Literal["seats", "uni", "mp", "ray"] = "seats"
    """Who runs the ranks: seats that stay, or vLLM's own workers, started with each engine (``uni``
    is one rank in the process of the engine, ``mp`` processes of this host, ``ray`` actors, which
    vLLM has for accelerators alone)."""
    front: Literal["step", "async"] = "step"
    """Who steps the scheduler: the seat that leads, between the driver's calls; or vLLM's
    ``AsyncLLM``, in two processes beside the seats that are forked with each engine."""
    extension: str = EXTENSION
    """Worker extension class: this one or a subclass."""
    start_s: float = 180.0
    """Longest wait for an engine to start, and for a seat."""
    call_s: float = 60.0
    """Longest wait for an engine's answer."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments of vLLM's own, which win."""
