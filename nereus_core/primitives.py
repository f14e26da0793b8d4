"""Split, Merge, Extend, Destroy: values with preconditions, and what each makes of a UnitMap."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from nereus_core.cluster import Device
from nereus_core.errors import DevicesBusy, Infeasible, LastUnit, NoSuchUnit, PrimitiveError
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ModelStage, Stage

OpId = NewType("OpId", str)


class Kind(StrEnum):
    """The four primitives."""

    SPLIT = "split"
    MERGE = "merge"
    EXTEND = "extend"
    DESTROY = "destroy"


@dataclass(frozen=True, slots=True)
class Split:
    """One unit becomes units of a smaller layout on (some of) its own devices."""

    op_id: OpId
    parent: UnitId
    into: tuple[Unit, ...]
    staging_bytes: int | None = None
    """As of a Merge."""

    def __str__(self) -> str:
        return f"split {self.parent} -> {', '.join(map(str, self.into))}"


@dataclass(frozen=True, slots=True)
class Merge:
    """Identical units become one larger unit; with one parent, that unit grows onto new devices."""

    op_id: OpId
    parents: tuple[UnitId, ...]
    into: Unit
    staging_bytes: int | None = None
    """Most bytes of new shards that may stand beside old ones on a device, the rest waits in host
    memory until the old ones have gone; None: no limit."""

    def __str__(self) -> str:
        return f"merge {' + '.join(map(str, self.parents))} -> {self.into}"


@dataclass(frozen=True, slots=True)
class Extend:
    """A new unit on newly acquired devices, its state copied from intact units or the origin."""

    op_id: OpId
    sources: tuple[UnitId, ...]
    """Units that hold the state: of the same stage, or of the train stage a follower follows. None
    of them: the state is loaded from the stage's origin (`workload.Node.origin`)."""
    unit: Unit

    def __str__(self) -> str:
        return f"extend {self.unit} from {', '.join(map(str, self.sources)) or 'its origin'}"


@dataclass(frozen=True, slots=True)
class Destroy:
    """End a unit and free its devices; parked, its shards stay in host memory until `relink`.

    A parked unit is not alive, but Extend may name it as a source until the transition ends.
    """

    op_id: OpId
    unit: UnitId
    park: bool = False

    def __str__(self) -> str:
        return f"destroy {self.unit}{' (parked)' if self.park else ''}"


Primitive = Split | Merge | Extend | Destroy


def kind_of(op: Primitive) -> Kind:
    """Name the primitive."""
    return Kind(type(op).__name__.lower())


def ended(op: Primitive) -> tuple[UnitId, ...]:
    """Units that the primitive ends."""
    match op:
        case Split():
            return (op.parent,)
        case Merge():
            return op.parents
        case Extend():
            return ()
        case Destroy():
            return (op.unit,)


def created(op: Primitive) -> tuple[Unit, ...]:
    """Units that the primitive creates."""
    match op:
        case Split():
            return op.into
        case Merge():
            return (op.into,)
        case Extend():
            return (op.unit,)
        case Destroy():
            return ()


def sources(op: Primitive) -> tuple[UnitId, ...]:
    """Units whose state the primitive reads."""
    return op.sources if isinstance(op, Extend) else ended(op)


def model_stage_of(op: Primitive) -> ModelStage:
    """Name the model-stage that the primitive changes."""
    made = created(op)
    return made[0].model_stage if made else ended(op)[0].model_stage


def _devices(units: tuple[Unit, ...]) -> frozenset[Device]:
    return frozenset(d for u in units for d in u.devices)


def acquired(op: Primitive, units: UnitMap) -> frozenset[Device]:
    """Devices that the stage holds after the primitive and not before."""
    return _devices(created(op)) - _devices(tuple(units[u] for u in ended(op)))


def released(op: Primitive, units: UnitMap) -> frozenset[Device]:
    """Devices that the stage holds before the primitive and not after."""
    return _devices(tuple(units[u] for u in ended(op))) - _devices(created(op))


def touched(op: Primitive, units: UnitMap) -> frozenset[Device]:
    """Devices that take part: of units ended and created, and of those that send state."""
    read = tuple(units[u] for u in sources(op) if u in units)
    return _devices(read) | _devices(created(op))


def check(op: Primitive, units: UnitMap, parked: Container[UnitId] = ()) -> None:
    """Raise unless the primitive's preconditions hold on these units.

    Args:
        op: The primitive.
        units: Units alive.
        parked: Units whose shards a parking Destroy kept in host memory: sources of an Extend.

    Raises:
        NoSuchUnit: a unit it names is not alive.
        DevicesBusy: a device it acquires belongs to another unit of the same stage.
        LastUnit: it would end the last unit of a stage without parking it.
        Infeasible: devices or layouts do not add up; the message says which.
        PrimitiveError: it mixes model-stages or repeats a unit.
    """
    for unit_id in (*ended(op), *sources(op)):
        if unit_id not in units and not (isinstance(op, Extend) and unit_id in parked):
            raise NoSuchUnit(unit_id, tuple(units), op)
    stage = model_stage_of(op)
    strangers = [u for u in ended(op) if u.model_stage != stage] + [
        u.id for u in created(op) if u.model_stage != stage
    ]
    if strangers:
        raise PrimitiveError(f"{op}: {strangers[0]} is not of {stage}.", op)
    if isinstance(op, Extend):
        foreign = any(u.model_stage.model != stage.model for u in op.sources)
        if foreign or (not op.sources and stage.stage is Stage.TRAIN):
            raise PrimitiveError(f"{op}: sources must be units of model {stage.model!r}.", op)
    if len(set(ended(op))) != len(ended(op)):
        raise PrimitiveError(f"{op}: a unit is named twice.", op)
    survivors = set(units) - set(ended(op))
    taken = [u.id for u in created(op) if u.id in survivors or u.id in parked]
    if taken or len({u.id for u in created(op)}) != len(created(op)):
        raise PrimitiveError(f"{op}: unit id {(taken or [created(op)[0].id])[0]} is taken.", op)
    _check_devices(op, units)
    if isinstance(op, Destroy) and not op.park and len(units.of(stage)) == 1:
        raise LastUnit(op.unit, op)


def _check_devices(op: Primitive, units: UnitMap) -> None:
    stage = model_stage_of(op)
    listed = [d for u in created(op) for d in u.devices]
    if len(listed) != len(set(listed)):
        raise Infeasible(f"{op}: new units overlap on a device.", op)
    busy = [
        (device, unit.id)
        for unit in units.of(stage)
        if unit.id not in ended(op)
        for device in unit.devices
        if device in set(listed)
    ]
    if busy:
        raise DevicesBusy(str(op), busy, op)
    if isinstance(op, Split):
        if not op.into:
            raise Infeasible(f"{op}: a split needs at least one child.", op)
        outside = set(listed) - set(units[op.parent].devices)
        if outside:
            raise Infeasible(
                f"{op}: {', '.join(map(str, sorted(outside)))} do not belong to {op.parent}; "
                "a split stays on its parent's devices.",
                op,
            )
        if len({u.layout for u in op.into}) > 1:
            raise Infeasible(f"{op}: children must share one layout.", op)
    if isinstance(op, Merge):
        union = {d for u in op.parents for d in units[u].devices}
        if not op.parents:
            raise Infeasible(f"{op}: a merge needs at least one parent.", op)
        if len(op.parents) > 1 and not set(listed) <= union:
            raise Infeasible(f"{op}: merged devices must be those of the parents.", op)
        if len(op.parents) == 1 and not set(listed) >= union:
            raise Infeasible(f"{op}: a unit that grows keeps its devices; use a split.", op)
        if len({units[u].layout for u in op.parents}) > 1:
            raise Infeasible(f"{op}: parents must share one layout.", op)


def apply(op: Primitive, units: UnitMap, parked: Container[UnitId] = ()) -> UnitMap:
    """Return the units after the primitive; raises what `check` raises.

    This is the specification: an adapter's ``units()`` after a primitive must equal it.
    """
    check(op, units, parked)
    return units.replace(ended(op), created(op))
