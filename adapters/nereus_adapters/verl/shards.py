"""shards: the state of one role in one worker process, as boxes of logical tensors.

Runs inside verl's worker processes. A *held* state is what one rank of a unit holds: read from the
live engine, or staged in host memory by a primitive until an engine is built from it. Nothing is
gathered: a rank reads, sends and receives parts of its own shards only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nereus_adapters.verl.cuts import ROWS, Cut
from nereus_adapters.verl.facts import training_workers
from nereus_core.errors import PrimitiveError
from nereus_core.state import Box, Slot

Part = tuple[str, str, Box]
"""Slot, tensor and box of a piece of state."""
_STEP = "step"
_EXPECTED = "expected Adam or a kin of it"


@dataclass(slots=True)
class Held:
    """What one rank of a unit holds."""

    role: str
    boxes: dict[str, Box]
    shapes: dict[str, tuple[int, ...]]
    """Of the whole tensors."""
    tensors: dict[tuple[str, str], torch.Tensor]
    """By slot and tensor, in the shape of the tensor's box."""
    cuts: dict[str, Cut] = field(default_factory=dict)
    """How the ranks of a unit share each tensor."""
    num_layers: int = 1
    """That pipeline stages share out; 1 where there can be none."""
    counters: dict[str, float] = field(default_factory=dict)
    """Steps that the optimizer has taken, by tensor."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Learning-rate scheduler, hyper-parameters, gradient scaler, random state."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What a held state is made of, without its bytes."""

    boxes: Mapping[str, Box]
    shapes: Mapping[str, tuple[int, ...]]
    cuts: Mapping[str, Cut]
    num_layers: int
    dtypes: Mapping[tuple[str, str], torch.dtype]
    counters: Mapping[str, float]
    extras: Mapping[str, Any]

    @classmethod
    def of_unit(cls, ranks: Sequence[Outline]) -> Outline:
        """Return what the ranks of a unit hold between them, whose stages hold other tensors each.

        Boxes are left out; extras are those of the first rank.
        """
        shapes, cuts, dtypes, counters = (
            {key: value for rank in ranks for key, value in getattr(rank, field).items()}
            for field in ("shapes", "cuts", "dtypes", "counters")
        )
        return cls({}, shapes, cuts, ranks[0].num_layers, dtypes, counters, ranks[0].extras)


def staged(worker: Any) -> dict[str, Held]:
    """Return the states staged in this process, by unit; they live with verl's actor object."""
    found: dict[str, Held] | None = getattr(worker, "_nereus_staged", None)
    if found is None:
        found = worker._nereus_staged = {}
    return found


def held(worker: Any, role: str, unit: str) -> Held:
    """Return the state of a unit's rank here: staged, or seen in the live engine (no copy)."""
    if unit in staged(worker):
        return staged(worker)[unit]
    for name, trainer in training_workers(worker):
        if name == role:
            return of_engine(role, trainer.engine)
    raise PrimitiveError(f"this process holds no state of {unit} ({role}).")


def of_engine(role: str, engine: Any) -> Held:
    """See an engine's local shards, moments, counters and schedules."""
    found = Held(role, {}, {}, {})
    cuts, found.num_layers = getattr(engine, "cuts", {}), getattr(engine, "num_layers", 1)
    states = engine.optimizer.state if engine.optimizer is not None else {}
    for name, parameter in engine.module.named_parameters():
        found.boxes[name] = local_box(parameter)
        found.shapes[name] = tuple(parameter.shape)
        found.cuts[name] = cuts.get(name, ROWS)
        found.tensors[Slot.PARAM.value, name] = local(parameter)
        for key, value in states.get(parameter, {}).items():
            if key == _STEP:
                found.counters[name] = float(value)
            elif torch.is_tensor(value) and value.shape == parameter.shape:
                found.tensors[key, name] = local(value)
            else:
                raise not_adam(key, name)
        if states.get(parameter) and name not in found.counters:
            raise no_step(name)
    found.extras = _extras(engine)
    return found


def not_adam(slot: str, name: str) -> PrimitiveError:
    """Build the error for optimizer state that is not known how to cut."""
    return PrimitiveError(
        f"optimizer state {slot!r} of {name} is neither a step nor shaped as its parameter; "
        f"{_EXPECTED}."
    )


def no_step(name: str) -> PrimitiveError:
    """Build the error for optimizer state that does not say how many steps it has taken."""
    return PrimitiveError(f"optimizer state of {name} has no step; {_EXPECTED}.")


def _extras(engine: Any) -> dict[str, Any]:
    extras: dict[str, Any] = {"rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        extras["cuda_rng"] = torch.cuda.get_rng_state()
    if engine.optimizer is not None:
        extras["groups"] = [
            {k: v for k, v in group.items() if k != "params"}
            for group in engine.optimizer.param_groups
        ]
    for name in ("lr_scheduler", "scaler"):
        if getattr(engine, name, None) is not None:
            extras[name] = getattr(engine, name).state_dict()
    return extras


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, or the tensor itself."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return tensor.detach() if to_local is None else to_local()


def local_box(tensor: torch.Tensor) -> Box:
    """Return the box of the logical tensor that this rank holds."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(tuple(offset), tuple(shape))


# --- Called by the driver -------------------------------------------------------------------------


def present(worker: Any) -> None:
    """Answer, as a process does that is there."""


def outline(worker: Any, role: str, unit: str) -> Outline:
    """Describe a rank's state."""
    found = held(worker, role, unit)
    dtypes = {key: tensor.dtype for key, tensor in found.tensors.items()}
    return Outline(
        found.boxes, found.shapes, found.cuts, found.num_layers, dtypes, found.counters,
        found.extras,
    )  # fmt: skip


def begin(worker: Any, unit: str, role: str, boxes: Mapping[str, Box], source: Outline) -> None:
    """Make room, in host memory, for a rank's state of a new unit."""
    tensors = {
        (slot, name): torch.empty(boxes[name].shape, dtype=dtype)
        for (slot, name), dtype in source.dtypes.items()
        if name in boxes
    }
    staged(worker)[unit] = Held(
        role,
        dict(boxes),
        {name: source.shapes[name] for name in boxes},
        tensors,
        {name: source.cuts[name] for name in boxes},
        source.num_layers,
        {name: step for name, step in source.counters.items() if name in boxes},
        dict(source.extras),
    )


def send(
    worker: Any, role: str, unit: str, wanted: Iterable[tuple[str, Box]]
) -> list[tuple[Part, torch.Tensor, str]]:
    """Read boxes of every slot; with the digest of each, taken before it leaves."""
    found = held(worker, role, unit)
    parts = []
    for name, box in wanted:
        for slot in _slots(found, name):
            tensor = found.tensors[slot, name][box.within(found.boxes[name])]
            # A copy: what is sent must not change when the engine does.
            piece = tensor.to("cpu", copy=True).contiguous()
            parts.append(((slot, name, box), piece, digest(piece, box, found.shapes[name])))
    return parts


def receive(worker: Any, unit: str, *sent: list[tuple[Part, torch.Tensor, str]]) -> int:
    """Put parts where they belong and compare their digests; returns the bytes taken in."""
    mine, total = staged(worker)[unit], 0
    for (slot, name, box), piece, before in (part for parts in sent for part in parts):
        place = mine.tensors[slot, name][box.within(mine.boxes[name])]
        place.copy_(piece)
        total += piece.nbytes
        after = digest(place.contiguous(), box, mine.shapes[name])
        if after != before:
            raise PrimitiveError(
                f"{unit}: {slot}/{name} at {box} arrived with digest {after}, was sent as {before}."
            )
    return total


def hold(worker: Any, units: Mapping[str, str]) -> None:
    """Stage what the live engines hold under their units' names (role -> unit), without a copy."""
    for role, unit in units.items():
        if unit not in staged(worker):
            staged(worker)[unit] = held(worker, role, unit)


def drop(worker: Any, units: Iterable[str]) -> None:
    """Forget staged states."""
    for unit in units:
        staged(worker).pop(unit, None)


def digests(worker: Any, role: str, unit: str) -> tuple[dict[str, tuple[Box, int]], dict[str, int]]:
    """Return this rank's part of the digest of every tensor, and the counters."""
    found = held(worker, role, unit)
    parts = {
        f"{slot}/{name}": (
            found.boxes[name],
            int(digest(tensor, found.boxes[name], found.shapes[name]), 16),
        )
        for (slot, name), tensor in found.tensors.items()
    }
    steps = {int(step) for step in found.counters.values()}
    counters = {"optimizer_step": max(steps)} if steps else {}
    schedule = found.extras.get("lr_scheduler")
    if schedule is not None:
        counters["scheduler_step"] = int(schedule["last_epoch"])
    return parts, counters


def _slots(found: Held, name: str) -> Iterator[str]:
    return (slot for slot, tensor in found.tensors if tensor == name)


_CHUNK = 1 << 20
"""Elements digested at once, to bound the memory it takes; chosen, not measured."""
_MIX, _ADD = -7046029254386353131, -4658895280553007687  # splitmix64's constants as signed integers
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> str:
    """Digest a box of a logical tensor; digests of disjoint boxes add up modulo 2**64.

    Each element contributes a mix of its bits and its place in the whole tensor, so that the sum
    over all ranks does not depend on how the tensor is cut.
    """
    if not tensor.numel():
        return f"{0:016x}"
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).reshape(-1)
    index = torch.zeros((), dtype=torch.int64)
    for size, offset, extent in zip(shape, box.offset, box.shape, strict=True):
        at = torch.arange(offset, offset + extent, dtype=torch.int64)
        index = index[..., None] * size + at
    index, total = index.reshape(-1), 0
    for start in range(0, bits.numel(), _CHUNK):
        values = bits[start : start + _CHUNK].to("cpu", torch.int64)
        mixed = (values + 1) * ((index[start : start + _CHUNK] * _MIX + _ADD) | 1)
        mixed = (mixed ^ (mixed >> 29)) * _ADD
        total += int(mixed.sum())
    return f"{total % 2**64:016x}"
