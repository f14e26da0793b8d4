"""Inside: what is asked of a Ray actor in its own process; shipped there by `ray_calls.inside`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an actor of Ray is."""

    node: str
    gpu: int | None
    """Index of its device in the node; None when Ray gave it none (an engine of several)."""
    pg: Any
    """Its placement group; None outside one."""
    bundles: tuple[int, ...]
    """Bundles of an engine of several devices, where vLLM was told them."""
    share: float
    """Of its device that Ray gave it; 0 for an engine whose workers are actors of their own."""


def whereabouts(actor: Any) -> Whereabouts:
    """Say where an actor is. Touches no device."""
    import ray
    from ray.util import get_current_placement_group

    gpus = ray.get_gpu_ids()
    told = os.environ.get("VLLM_RAY_BUNDLE_INDICES", "")
    return Whereabouts(
        node=ray.util.get_node_ip_address(),
        gpu=int(gpus[0]) if gpus else None,
        pg=get_current_placement_group(),
        bundles=tuple(map(int, told.split(","))) if told else (),
        share=float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)),
    )


def device_kind(actor: Any) -> str:
    """Return what CUDA calls the device of an actor, ``cpu`` where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def peak_bytes(actor: Any) -> int | None:
    """Return and reset the most bytes that torch had allocated; None without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    peak: int = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def max_steps(actor: Any) -> int | None:
    """Return the optimizer steps that the schedule of the actor was made for."""
    found: int | None = actor.max_steps
    return found
