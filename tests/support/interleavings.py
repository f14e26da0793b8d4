"""Every way an executor may interleave the primitives of a graph, and what must hold in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, permutations

from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import (
    Destroy,
    Extend,
    Merge,
    Primitive,
    Split,
    apply,
    check,
    created,
    ended,
    sources,
    touched,
)
from nereus_core.transition import TransitionGraph
from nereus_core.transition.room import unit_bytes
from nereus_core.units import UnitMap
from nereus_core.workload import Job, ModelStage


def explore(graph: TransitionGraph, job: Job, capacity_bytes: int | None = None) -> int:
    """Visit every state that launching and finishing primitives can lead to; return how many.

    A state is which primitives are done and which run. A primitive may be launched when those it
    waits for are done and no device it touches is in use, whatever else could be launched.

    Raises:
        AssertionError: a state is stuck; a precondition does not hold; a unit ends while a
            primitive that reads it has not finished, or without another copy; a device holds more
            than its capacity.
    """
    ops = graph.ops
    number = {op.op_id: i for i, op in enumerate(ops)}
    waits = [0] * len(ops)
    for edge in graph.edges:
        waits[number[edge.after]] |= 1 << number[edge.before]
    devices = [touched(op, graph.atlas) for op in ops]
    clash = [
        sum(1 << j for j, other in enumerate(devices) if j != i and not mine.isdisjoint(other))
        for i, mine in enumerate(devices)
    ]
    readers = {
        i: sum(1 << j for j, other in enumerate(ops) if _reads(other, op))
        for i, op in enumerate(ops)
    }
    everything = (1 << len(ops)) - 1
    units = _units_by_done(graph)
    seen, front = {(0, 0)}, [(0, 0)]
    while front:
        done, running = front.pop()
        alive, parked = units(done)
        if capacity_bytes is not None:
            _within(graph, job, alive, [ops[i] for i in _set(running)], capacity_bytes)
        found = [(done | 1 << i, running & ~(1 << i)) for i in _set(running)]
        for i in _set(everything & ~done & ~running):
            if waits[i] & ~done or clash[i] & running:
                continue
            check(ops[i], alive, parked)  # raises when a precondition does not hold
            found.append((done, running | 1 << i))
        assert found or done == everything, f"stuck: {graph.explain()}"
        for i in _set(running):
            op = ops[i]
            if isinstance(op, Destroy) and not op.park:
                assert not readers[i] & ~done, f"{op} before all have read it"
                apply(op, alive, parked)  # raises LastUnit when no other copy is left
        for state in found:
            if state not in seen:
                seen.add(state)
                front.append(state)
    assert units(everything)[0] == graph.units_after()
    return len(seen)


def _reads(op: Primitive, end: Primitive) -> bool:
    return isinstance(op, Extend) and isinstance(end, Destroy) and end.unit in sources(op)


def _units_by_done(graph):
    known = {}

    def units(done):
        if done not in known:
            ops = [graph.ops[i] for i in _set(done)]
            gone = {u for op in ops for u in ended(op)}
            made = [u for op in ops for u in created(op)]
            alive = graph.units_before.replace(gone, (u for u in made if u.id not in gone))
            known[done] = alive, graph.parked({op.op_id for op in ops})
        return known[done]

    return units


def _within(
    graph: TransitionGraph, job: Job, alive: UnitMap, running: list[Primitive], capacity: int
) -> None:
    """Hold what lies on every device, with new shards beside old ones, against the capacity."""
    held: dict[Device, int] = {}
    for unit in alive.values():
        for device, size in unit_bytes(job, unit).items():
            held[device] = held.get(device, 0) + size
    for op in running:
        limit = op.staging_bytes if isinstance(op, Split | Merge) else None
        for unit in created(op):
            for device, size in unit_bytes(job, unit).items():
                staged = size if limit is None else min(size, limit)
                assert held.get(device, 0) + staged <= capacity, f"{op} overfills {device}"
    for device, size in held.items():
        assert size <= capacity, f"{device} holds {size} of {capacity} bytes"


def _set(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


# --- All small plans ----------------------------------------------------------------------------


def small_placements(devices: tuple[Device, ...], layouts: tuple[Layout, ...]) -> list[Placement]:
    """List every set of units of one layout on these devices; ranks in device order."""
    found = []
    for layout in layouts:
        choices = list(combinations(devices, layout.num_devices))
        for count in range(1, len(devices) // layout.num_devices + 1):
            found += [
                Placement(layout, units)
                for units in combinations(choices, count)
                if len({d for unit in units for d in unit}) == count * layout.num_devices
            ]
    return found


def small_plans(
    stages: tuple[ModelStage, ...],
    devices: tuple[Device, ...],
    layouts: tuple[Layout, ...],
    max_units: int,
) -> list[Plan]:
    """List every plan of at most so many units in all."""
    plans: list[dict[ModelStage, Placement]] = [{}]
    for stage in stages:
        plans = [
            {**plan, stage: placement}
            for plan in plans
            for placement in small_placements(devices, layouts)
            if sum(p.dp for p in plan.values()) + placement.dp <= max_units
        ]
    return [Plan(plan) for plan in plans]


def distinct_pairs(
    plans: list[Plan], devices: tuple[Device, ...]
) -> Iterator[tuple[Plan, list[Plan]]]:
    """Yield plans with the targets to explore from each: pairs that are alike but for the names of
    devices come once.
    """
    number = {d: i for i, d in enumerate(devices)}
    orders = list(permutations(range(len(devices))))
    renamed = [{d: order[i] for d, i in number.items()} for order in orders]
    index = {_key(plan, number): i for i, plan in enumerate(plans)}
    # images[i][r]: which plan the i-th is once devices are renamed in the r-th way
    images = [[index[_key(plan, names)] for names in renamed] for plan in plans]
    for i, before in enumerate(plans):
        if min(images[i]) < i:
            continue
        same = [r for r, image in enumerate(images[i]) if image == i]
        afters = [p for j, p in enumerate(plans) if j == min(images[j][r] for r in same)]
        yield before, afters


def _key(plan: Plan, number: Mapping[Device, int]) -> object:
    return tuple(
        (stage, p.layout, frozenset(tuple(sorted(number[d] for d in unit)) for unit in p.units))
        for stage, p in plan.items()
    )
