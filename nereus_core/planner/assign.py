"""Give device groups to stages so that as little as possible moves from the current plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from nereus_core.cluster import Device
from nereus_core.plan import Placement, Plan
from nereus_core.planner.space import Combination, Option

_MAX_ORDERS = 120  # orders of groups tried: all of up to five; chosen


def assign(
    groups: Sequence[tuple[Combination, int]], devices: tuple[Device, ...], current: Plan | None
) -> Plan:
    """Lay groups of the given sizes over contiguous devices; the order that moves least wins.

    Devices come in node order, so that a tensor-parallel group stays inside a node where sizes
    allow. A stage whose layout and devices stay keeps the order of its devices too.
    """
    best: tuple[int, int] | None = None
    found: Plan | None = None
    for rank, order in enumerate(permutations(range(len(groups)))):
        if rank >= _MAX_ORDERS:
            break
        plan = _lay([groups[i] for i in order], devices, current)
        moved = sum(moved_bytes(o, plan[o.stage], current) for c, _ in groups for o in c.options)
        if best is None or (moved, rank) < best:
            best, found = (moved, rank), plan
    assert found is not None
    return found


def moved_bytes(option: Option, placement: Placement, current: Plan | None) -> int:
    """Bound the bytes that devices of a stage must fetch, coming from the current plan."""
    before = None if current is None else current.get(option.stage)
    if before is None or before == placement:
        return 0
    fresh = len(placement.devices - before.devices)
    changed = len(placement.devices) if before.layout != placement.layout else fresh
    return changed * option.resident_bytes


def _lay(
    groups: Sequence[tuple[Combination, int]], devices: tuple[Device, ...], current: Plan | None
) -> Plan:
    placements, start = {}, 0
    for combination, size in groups:
        members = devices[start : start + size]
        start += size
        for option in combination.options:
            placement = Placement.packed(option.layout, members[: option.num_devices])
            running = None if current is None else current.get(option.stage)
            if (
                running is not None
                and running.layout == placement.layout
                and running.devices == placement.devices
            ):
                placement = running
            placements[option.stage] = placement
    return Plan(placements)
