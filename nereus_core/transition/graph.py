"""TransitionGraph: primitives and the reasons one must precede another; acyclic by construction."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError as FoundCycle
from graphlib import TopologicalSorter
from typing import Any, Protocol

from nereus_core.cost import Interval
from nereus_core.errors import CycleError
from nereus_core.primitives import (
    Destroy,
    OpId,
    Primitive,
    created,
    ended,
    kind_of,
    model_stage_of,
    touched,
)
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import ModelStage


class EdgeKind(StrEnum):
    """Why one primitive waits for another."""

    STATE = "state"
    """It needs a unit the other makes, or ends a unit the other reads."""
    RELEASE = "release"
    """It acquires a device that the other releases."""
    ORDER = "order"
    """Both touch a device and nothing else orders them."""


@dataclass(frozen=True, slots=True)
class Edge:
    """``before`` must have finished when ``after`` starts."""

    before: OpId
    after: OpId
    kind: EdgeKind
    reason: str


class PrimitiveCost(Protocol):
    """Prices one primitive; `nereus_core.cost.CostModel` is one."""

    def primitive(self, op: Primitive, units: UnitMap, parked: Container[UnitId] = ()) -> Interval:
        """Seconds of a primitive; ``units`` holds every unit it names, also those parked."""
        ...


class Steps(Protocol):
    """Primitives and what each waits for; `pairs` says it by position, wrapping no value."""

    @property
    def ops(self) -> tuple[Primitive, ...]:
        """Primitives."""
        ...

    @property
    def edges(self) -> tuple[Edge, ...]:
        """What they wait for."""
        ...

    def pairs(self) -> Iterable[tuple[int, int]]:
        """Yield the positions of the primitives that every edge joins, the first one first."""
        ...


@dataclass(frozen=True, slots=True)
class Listed:
    """Steps as values."""

    ops: tuple[Primitive, ...]
    edges: tuple[Edge, ...]

    def pairs(self) -> Iterable[tuple[int, int]]:
        """See `Steps`."""
        place = {op.op_id: i for i, op in enumerate(self.ops)}
        return [(place[e.before], place[e.after]) for e in self.edges]


@dataclass(frozen=True, eq=False)
class TransitionGraph:
    """What turns one set of units into another. A cycle in it raises CycleError at once."""

    name: str
    units_before: UnitMap
    steps: Steps = field(repr=False)
    parked_before: UnitMap = field(default_factory=UnitMap)
    """Units that an earlier, failed transition parked: sources only."""
    _priced: tuple[PrimitiveCost, Mapping[OpId, Interval]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self._listed_in_order():
            self.topological()

    def __eq__(self, other: object) -> bool:
        return self._value == other._value if isinstance(other, TransitionGraph) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def _value(self) -> tuple[object, ...]:
        return self.name, self.units_before, self.ops, self.edges, self.parked_before

    @property
    def ops(self) -> tuple[Primitive, ...]:
        """Primitives, in an order that keeps every edge where the compiler made them."""
        return self.steps.ops

    @property
    def edges(self) -> tuple[Edge, ...]:
        """What primitives wait for, and why."""
        return self.steps.edges

    @cached_property
    def by_id(self) -> Mapping[OpId, Primitive]:
        """Primitives by id."""
        return {op.op_id: op for op in self.ops}

    @cached_property
    def atlas(self) -> UnitMap:
        """Every unit that is alive or parked at some time of the transition."""
        made = [u for op in self.ops for u in created(op)]
        return UnitMap([*self.parked_before.values(), *self.units_before.values(), *made])

    @property
    def stages(self) -> frozenset[ModelStage]:
        """Model-stages that a boundary must hold: those that change, and those that send state."""
        changed = {model_stage_of(op) for op in self.ops}
        read = {u.model_stage for op in self.ops for u in getattr(op, "sources", ())}
        return frozenset(changed | read)

    @property
    def changed(self) -> tuple[ModelStage, ...]:
        """Model-stages whose units change, sorted."""
        return tuple(sorted({model_stage_of(op) for op in self.ops}))

    def units_after(self, done: Container[OpId] | None = None) -> UnitMap:
        """Units alive when the primitives ``done``, or all, have finished."""
        ops = [op for op in self.ops if done is None or op.op_id in done]
        gone = {u for op in ops for u in ended(op)}
        made = (u for op in ops for u in created(op))
        return self.units_before.replace(gone, (u for u in made if u.id not in gone))

    def parked(self, done: Container[OpId]) -> UnitMap:
        """Units in host memory when the primitives ``done`` have finished."""
        parks = (op for op in self.ops if isinstance(op, Destroy) and op.park)
        added = (self.atlas[op.unit] for op in parks if op.op_id in done)
        return UnitMap([*self.parked_before.values(), *added])

    def next_serials(self) -> dict[ModelStage, int]:
        """By model-stage, the least serial that no unit of the transition has."""
        return {stage: self.atlas.next_serial(stage) for stage in self.atlas.stages()}

    def predecessors(self) -> dict[OpId, set[OpId]]:
        """For every primitive, in order: those that must finish first."""
        before: dict[OpId, set[OpId]] = {op.op_id: set() for op in self.ops}
        for edge in self.edges:
            before[edge.after].add(edge.before)
        return before

    def topological(self) -> tuple[Primitive, ...]:
        """Primitives in an order that keeps every edge: as listed, when that does.

        Raises:
            CycleError: there is none; spells the cycle out.
        """
        if self._listed_in_order():
            return self.ops
        try:
            order = list(TopologicalSorter(self.predecessors()).static_order())
        except FoundCycle as error:
            raise CycleError(error.args[1]) from error
        return tuple(self.by_id[op_id] for op_id in order)

    def _listed_in_order(self) -> bool:
        return all(first < then for first, then in self.steps.pairs())

    @property
    def depth(self) -> int:
        """Primitives on the longest path."""
        before, depth = self.predecessors(), dict[OpId, int]()
        for op in self.topological():
            depth[op.op_id] = 1 + max((depth[p] for p in before[op.op_id]), default=0)
        return max(depth.values(), default=0)

    def prices(self, cost: PrimitiveCost) -> Mapping[OpId, Interval]:
        """Seconds of every primitive; asked again with the same cost model, nothing is computed."""
        if self._priced is None or self._priced[0] is not cost:
            parked = self.parked(self.by_id)
            prices = {op.op_id: cost.primitive(op, self.atlas, parked) for op in self.ops}
            object.__setattr__(self, "_priced", (cost, prices))  # a memo: no part of the value
            return prices
        return self._priced[1]

    def predicted(self, cost: PrimitiveCost) -> Interval:
        """Makespan: the longest path, for the mean and for each bound."""
        before, prices = self.predecessors(), self.prices(cost)
        finish: dict[OpId, tuple[float, float, float]] = {}
        for op in self.topological():
            own = prices[op.op_id]
            starts = [finish[p] for p in before[op.op_id]] or [(0.0, 0.0, 0.0)]
            mean_s, low_s, high_s = (max(times) for times in zip(*starts, strict=True))
            finish[op.op_id] = (mean_s + own.mean_s, low_s + own.low_s, high_s + own.high_s)
        ends = list(finish.values()) or [(0.0, 0.0, 0.0)]
        return Interval(*(max(times) for times in zip(*ends, strict=True)))

    def longest(self, cost: PrimitiveCost) -> tuple[Primitive, ...]:
        """Primitives of the longest path by mean seconds, in order: what a makespan consists of."""
        before, prices = self.predecessors(), self.prices(cost)
        finish: dict[OpId, tuple[float, tuple[Primitive, ...]]] = {}
        none: tuple[float, tuple[Primitive, ...]] = (0.0, ())
        for op in self.topological():
            start_s, path = max((finish[p] for p in before[op.op_id]), key=_seconds, default=none)
            finish[op.op_id] = (start_s + prices[op.op_id].mean_s, (*path, op))
        return max(finish.values(), key=_seconds, default=none)[1]

    def explain(self) -> str:
        """Say in a line per primitive what is done, and beneath it what it waits for and why."""
        if not self.ops:
            return f"transition {self.name}: nothing to do"
        waits: dict[OpId, list[Edge]] = {op.op_id: [] for op in self.ops}
        for edge in self.edges:
            waits[edge.after].append(edge)
        lines = [f"transition {self.name}: {len(self.ops)} primitives, edges: {len(self.edges)}"]
        for op in self.topological():
            lines.append(f"  {op.op_id}  {op}")
            lines += [f"      after {e.before} ({e.kind}): {e.reason}" for e in waits[op.op_id]]
        return "\n".join(lines)

    def to_json(self, cost: PrimitiveCost | None = None) -> tuple[list[Any], list[Any]]:
        """Return nodes and edges as plain values, in the shape of events.TransitionStarted."""
        prices = {} if cost is None else self.prices(cost)
        ops = [
            {
                "op_id": op.op_id,
                "kind": str(kind_of(op)),
                "text": str(op),
                "stage": str(model_stage_of(op)),
                "devices": [str(d) for d in sorted(touched(op, self.atlas))],
                "predicted_s": prices[op.op_id].mean_s if prices else None,
            }
            for op in self.topological()
        ]
        edges = [
            {"before": e.before, "after": e.after, "kind": str(e.kind), "reason": e.reason}
            for e in self.edges
        ]
        return ops, edges


def _seconds(path: tuple[float, tuple[Primitive, ...]]) -> float:
    return path[0]
