"""facts: what a worker process of a verl job says of itself; runs inside that process.

Nothing here touches a device: configurations, mesh shapes and process facts only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nereus_adapters.verl.tensor_parallel import VENDOR
from nereus_core.layout import Layout

_NO_STAGES = "verl's FSDP engine has no pipeline stages"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One model engine of a worker process."""

    role: str
    """``actor``, ``ref`` or ``critic``."""
    layout: Layout
    """Ranks that hold one copy of the state between them: tp and pp of Megatron's engine and of
    Nereus's; with verl's FSDP the last dimension of the mesh, written as tp."""
    hf_config: dict[str, Any]
    params_dtype: str
    """Of the parameters that the optimizer works on, e.g. ``float32``."""
    sequence_ranks: int = 1
    """Ranks that share each sequence (Ulysses)."""
    packs: bool = True
    """Whether sequences are packed without padding, as Ulysses needs them."""
    tensor_parallel: bool = False
    """Whether it is Nereus's own engine (`tensor_parallel`)."""
    elements: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Of its parameters where it is, by the layer in whose stage they lie and by the extent that
    the ranks of a stage cut: all of a rank's where they do not divide it, as of 1, which is that of
    tensors that are cut nowhere."""
    unpipelined: str | None = _NO_STAGES
    """Why units can have no pipeline stages."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker process."""

    node: str
    accelerator: int
    """Index of its accelerator on the node, as Ray counts (logical where there is none)."""
    device_name: str
    device_bytes: int | None
    """Memory of the accelerator; None where it is no CUDA device."""
    engines: tuple[EngineFacts, ...]

    def engine(self, role: str) -> EngineFacts | None:
        """Return the engine of a role; None where there is no such engine."""
        return next((engine for engine in self.engines if engine.role == role), None)


def worker_facts(worker: Any) -> WorkerFacts:
    """Describe the worker process this runs in; ``worker`` is verl's actor object."""
    import ray
    import torch

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU") or ["0"]
    name, total = "cpu", None
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, total = found.name, found.total_memory
    return WorkerFacts(
        node=ray.util.get_node_ip_address().strip("[]"),
        accelerator=int(ids[0]) if ids[0].isdigit() else 0,
        device_name=name,
        device_bytes=total,
        engines=tuple(_facts(role, held) for role, held in training_workers(worker)),
    )


def training_workers(worker: Any) -> Iterator[tuple[str, Any]]:
    """Yield (role, TrainingWorker) of a worker process; none of a parked one.

    An ActorRolloutRefWorker holds those of actor and reference; separate_async has one for each.
    """
    for key, held in getattr(worker, "worker_dict", {}).items():
        if hasattr(held, "init_model"):
            for role in ("ref", "actor"):
                if getattr(held, role, None) is not None:
                    yield role, getattr(held, role)
        elif getattr(held, "engine", None) is not None:
            yield key, held


def _facts(role: str, held: Any) -> EngineFacts:
    engine = held.engine
    mesh = getattr(engine, "device_mesh", None)
    parameter = next(iter(engine.module.parameters()), None) if mesh is not None else None
    return EngineFacts(
        role=role,
        layout=_layout(engine, mesh),
        hf_config=engine.model_config.hf_config.to_dict(),
        params_dtype="float32"
        if parameter is None
        else str(parameter.dtype).removeprefix("torch."),
        sequence_ranks=int(getattr(engine, "ulysses_sequence_parallel_size", 1)),
        packs=bool(getattr(engine, "use_remove_padding", True)),
        tensor_parallel=getattr(engine, "vendor", None) == VENDOR,
        elements=cut_elements(engine),
        unpipelined=getattr(engine, "unpipelined", _NO_STAGES),
    )


def cut_elements(engine: Any) -> Mapping[tuple[int, int], int]:
    """Return `EngineFacts.elements` of a live engine."""
    found: Counter[tuple[int, int]] = Counter()
    for name, cut in getattr(engine, "cuts", {}).items():
        shape = engine.shapes[name]
        found[cut.layer, 1 if cut.dim is None else shape[cut.dim]] += math.prod(shape)
    return dict(found)


def _layout(engine: Any, mesh: Any) -> Layout:
    if mesh is not None:
        return Layout(mesh.shape[-1], getattr(engine, "stages", 1))
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tp, pp = (int(getattr(engine.engine_config, name, 1)) for name in degrees)
    return Layout(tp, pp)
