"""behind: what a harness sees and does inside verl's worker processes, past the adapter.

Shards of a live engine are found by torch's own account of where a DTensor's local part lies; those
that a primitive has staged are found where they are staged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nereus_adapters.verl.facts import training_workers
from nereus_adapters.verl.shards import staged
from nereus_core.harness import Array

Part = tuple[tuple[int, ...], tuple[int, ...], Array]
"""Shape of the whole tensor, offset of a part, the part."""


def parts(worker: Any, role: str, unit: str) -> dict[str, Part]:
    """Return copies of what this rank holds of a unit: ``slot/tensor`` -> part."""
    return {
        name: (shape, offset, tensor.detach().cpu().numpy().copy())
        for name, shape, offset, tensor in _tensors(worker, role, unit)
    }


def disturb(worker: Any, role: str, unit: str, tensor: str) -> None:
    """Add one to a tensor, in place."""
    for name, _, _, found in _tensors(worker, role, unit):
        if name == tensor:
            with torch.no_grad():
                found.add_(1)


def schedules(worker: Any) -> dict[str, Any]:
    """Return the learning-rate schedule of every engine."""
    return {
        role: trainer.engine.lr_scheduler.state_dict()
        for role, trainer in training_workers(worker)
        if trainer.engine.lr_scheduler is not None
    }


def reset(
    worker: Any, weights: Mapping[str, Mapping[str, Array]], schedules: Mapping[str, Any]
) -> None:
    """Put every engine back to where its job began: weights, no moments, schedule, random state."""
    for role, trainer in training_workers(worker):
        engine = trainer.engine
        for name, parameter in engine.module.named_parameters():
            mine = _local(parameter)
            place = tuple(
                slice(o, o + n) for o, n in zip(_offset(parameter), mine.shape, strict=True)
            )
            with torch.no_grad():
                mine.copy_(torch.from_numpy(weights[role][f"param/{name}"][place].copy()))
            parameter.grad = None
        if engine.optimizer is not None:
            engine.optimizer.state.clear()
        if role in schedules:
            engine.lr_scheduler.load_state_dict(schedules[role])
            rates = engine.lr_scheduler.get_last_lr()
            for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
    torch.manual_seed(0)


def resident_bytes(worker: Any) -> int:
    """Bytes of the state of this process's engines: parameters, gradients, moments."""
    total = 0
    for _, trainer in training_workers(worker):
        engine = trainer.engine
        states = engine.optimizer.state if engine.optimizer is not None else {}
        for parameter in engine.module.parameters():
            for tensor in (parameter, parameter.grad, *states.get(parameter, {}).values()):
                if torch.is_tensor(tensor) and tensor.dim():
                    total += _local(tensor).nbytes
    return total


def assembled(ranks: Sequence[Mapping[str, Part]], unit: str) -> dict[str, Array]:
    """Put the parts of all ranks together; raises AssertionError where they leave a hole."""
    whole: dict[str, Array] = {}
    covered: dict[str, int] = {}
    for rank in ranks:
        for name, (shape, offset, part) in rank.items():
            if name not in whole:
                whole[name], covered[name] = np.empty(shape, part.dtype), 0
            place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            whole[name][place] = part
            covered[name] += part.size
    for name, array in whole.items():
        assert covered[name] == array.size, (
            f"{name} of {unit}: ranks hold {covered[name]} of {array.size} elements"
        )
    return whole


def _tensors(
    worker: Any, role: str, unit: str
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    if unit in staged(worker):
        held = staged(worker)[unit]
        for (slot, name), tensor in held.tensors.items():
            yield f"{slot}/{name}", held.shapes[name], held.boxes[name].offset, tensor
        return
    for found, trainer in training_workers(worker):
        if found != role:
            continue
        engine = trainer.engine
        states = engine.optimizer.state if engine.optimizer is not None else {}
        for name, parameter in engine.module.named_parameters():
            slots = {"param": parameter, **states.get(parameter, {})}
            for slot, tensor in slots.items():
                if tensor.shape == parameter.shape:
                    yield f"{slot}/{name}", tuple(parameter.shape), _offset(tensor), _local(tensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _offset(tensor: Any) -> tuple[int, ...]:
    if not hasattr(tensor, "device_mesh"):
        return (0,) * int(tensor.dim())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: tuple[tuple[int, ...], tuple[int, ...]] = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return found[1]
