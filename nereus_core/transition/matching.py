"""Match the units of one model-stage to their places in a target, keeping most bytes in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus_core.cluster import Device
from nereus_core.cost.transition import shared_elements
from nereus_core.layout import Layout, layouts
from nereus_core.model import ModelSpec
from nereus_core.plan import Placement
from nereus_core.units import Unit

Place = tuple[Device, ...]
"""Devices of one target unit, in order of local rank."""

_EXACT = 12
"""Candidates that compete are packed exactly up to this number of them, else greedily: 2^12 steps
at most. Chosen, not measured."""

_BRIDGE = 0.9
"""A bridge is two primitives where an Extend is one, so it has to save a tenth of the bytes.
Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """Units that become others without leaving their devices: a Split, or a Merge."""

    parents: tuple[Unit, ...]
    places: tuple[Place, ...]
    layout: Layout
    """Of the units made."""
    is_split: bool
    """Whether it stays on the devices of one parent."""
    bridge_to: Place | None = None
    """Where the unit made grows on to, in the target's layout: its place was held in part only."""


@dataclass(frozen=True, slots=True)
class Match:
    """What becomes of every unit and every place of a model-stage."""

    kept: tuple[Unit, ...]
    in_place: tuple[InPlace, ...]
    new: tuple[Place, ...]
    surplus: tuple[Unit, ...]


def match(
    model: ModelSpec,
    units: tuple[Unit, ...],
    target: Placement,
    *,
    splits: bool = True,
    merges: bool = True,
) -> Match:
    """Match units to places.

    A unit that is already in its place is kept. Every other unit takes part in at most one of:
    becoming the places that lie inside its devices (Split), growing onto a place that contains it
    (Merge of one), or joining equal units that together cover a place (Merge). Where these compete
    for a unit or a place, those that keep most bytes are chosen, exactly among few, else greedily.
    A place still open that is held in part is reached over a bridge (a Split or Merge onto the part
    held, then a growth) where that moves clearly less than building it anew. What is left over is
    surplus, or new.

    Without splits or merges (an adapter that cannot do them), what is not kept is surplus or new.
    Units may have several layouts: a transition that failed part-way leaves such.
    """
    layout, free_places = target.layout, dict.fromkeys(target.units)
    kept, left = [], []
    for unit in units:
        if unit.devices in free_places and unit.layout == layout:
            kept.append(unit)
            del free_places[unit.devices]
        else:
            left.append(unit)
    if not left or not free_places:
        return Match(tuple(kept), (), tuple(free_places), tuple(left))
    candidates = _candidates(left, list(free_places), layout)
    if not (splits and merges):
        candidates = [c for c in candidates if (splits if c.is_split else merges)]
    chosen = _packed(model, candidates) if _compete(candidates) else candidates
    used = {u.id for c in chosen for u in c.parents}
    for candidate in chosen:
        for place in candidate.places:
            del free_places[place]
    left = [u for u in left if u.id not in used]
    if splits and merges and left and free_places:
        for bridge in _bridges(model, left, list(free_places), layout):
            gone = {u.id for u in bridge.parents}
            if bridge.bridge_to in free_places and gone <= {u.id for u in left}:
                chosen.append(bridge)
                del free_places[bridge.bridge_to]
                left = [u for u in left if u.id not in gone]
    return Match(tuple(kept), tuple(chosen), tuple(free_places), tuple(left))


def _candidates(units: list[Unit], places: list[Place], layout: Layout) -> list[InPlace]:
    """List every Split, growth and Merge between these units and places."""
    holder = {d: i for i, unit in enumerate(units) for d in unit.devices}
    taker = {d: i for i, place in enumerate(places) for d in place}
    found: list[InPlace] = []
    if holder.keys().isdisjoint(taker):
        return found
    for unit in units:
        shared = _counted(unit.devices, taker)
        inside = [places[i] for i, n in shared.items() if n == len(places[i])]
        if inside:
            found.append(InPlace((unit,), tuple(inside), layout, True))
    for place in places:
        shared = _counted(place, holder)
        touching = [units[i] for i in shared]
        covered = len(touching) > 1 and sum(shared.values()) == len(place)
        if covered and len({u.layout for u in touching}) == 1:
            found.append(InPlace(tuple(touching), (place,), layout, False))
        found += [
            InPlace((units[i],), (place,), layout, False)
            for i, n in shared.items()
            if n == len(units[i].devices) < len(place)
        ]
    return found


def _counted(devices: Place, owner: Mapping[Device, int]) -> dict[int, int]:
    """Count devices by owner, in order; those without one are left out."""
    found: dict[int, int] = {}
    for device in devices:
        i = owner.get(device)
        if i is not None:
            found[i] = found.get(i, 0) + 1
    return found


def _compete(candidates: list[InPlace]) -> bool:
    """Whether two want one unit or place; all are of one list, so that identity tells."""
    parents = [id(u) for c in candidates for u in c.parents]
    places = [id(p) for c in candidates for p in c.places]
    return len(parents) > len(set(parents)) or len(places) > len(set(places))


def _packed(model: ModelSpec, candidates: list[InPlace]) -> list[InPlace]:
    """Choose candidates that share no unit and no place and keep most, each for places left."""
    chosen: list[InPlace] = []
    for group in _rivals(candidates):
        group.sort(key=lambda c: -_kept_elements(model, c))
        if len(group) <= _EXACT:
            chosen += _best(model, group, frozenset())[1]
        else:
            taken: frozenset[object] = frozenset()
            for candidate in group:
                if cut := _cut(candidate, taken):
                    chosen.append(cut)
                    taken |= {*(u.id for u in cut.parents), *cut.places}
    return chosen


def _rivals(candidates: list[InPlace]) -> list[list[InPlace]]:
    """Group candidates that compete, directly or through others; in order of the first of each."""
    groups: list[tuple[set[object], list[InPlace]]] = []
    for candidate in candidates:
        wants: set[object] = {*(u.id for u in candidate.parents), *candidate.places}
        members = [candidate]
        apart = []
        for group in groups:
            if group[0].isdisjoint(wants):
                apart.append(group)
            else:
                wants |= group[0]
                members = [*group[1], *members]
        groups = [*apart, (wants, members)]
    return [members for _, members in groups]


def _best(
    model: ModelSpec, group: list[InPlace], taken: frozenset[object]
) -> tuple[int, list[InPlace]]:
    """Return the most elements that a choice keeps, and the choice; the first of equal ones."""
    if not group:
        return 0, []
    without = _best(model, group[1:], taken)
    cut = _cut(group[0], taken)
    if cut is None:
        return without
    kept, rest = _best(model, group[1:], taken | {*(u.id for u in cut.parents), *cut.places})
    kept += _kept_elements(model, cut)
    return (kept, [cut, *rest]) if kept >= without[0] else without


def _cut(candidate: InPlace, taken: frozenset[object]) -> InPlace | None:
    """Leave out places that are taken; None when its units are, or nothing is left."""
    places = tuple(p for p in candidate.places if p not in taken)
    if not places or any(u.id in taken for u in candidate.parents):
        return None
    return InPlace(candidate.parents, places, candidate.layout, candidate.is_split)


def _bridges(
    model: ModelSpec, units: list[Unit], places: list[Place], layout: Layout
) -> list[InPlace]:
    """List the bridges that move less than a unit built anew, those that save most first."""
    holder = {d: unit for unit in units for d in unit.devices}
    found: list[tuple[int, InPlace]] = []
    for place in places:
        touching = list(dict.fromkeys(holder[d] for d in place if d in holder))
        if not touching:
            continue
        anew = _moved(model, {}, place, layout)
        groups: list[tuple[Unit, ...]] = [(u,) for u in touching]
        if len(touching) > 1 and len({u.layout for u in touching}) == 1:
            groups.append(tuple(touching))
        for parents in groups:
            held = _shards(parents)
            part = tuple(d for d in place if d in held)
            for between in layouts(model, len(part), "divisors"):
                if between.num_devices != len(part) or len(part) == len(place):
                    continue
                there = {d: (between, rank) for rank, d in enumerate(part)}
                moved = _moved(model, held, part, between) + _moved(model, there, place, layout)
                if moved <= _BRIDGE * anew:
                    bridge = InPlace(parents, (part,), between, len(parents) == 1, place)
                    found.append((moved - anew, bridge))
    return [bridge for _, bridge in sorted(found, key=lambda pair: pair[0])]


Shards = dict[Device, tuple[Layout, int]]
"""Layout and local rank that a device holds."""


def _shards(units: tuple[Unit, ...]) -> Shards:
    return {d: (u.layout, rank) for u in units for rank, d in enumerate(u.devices)}


def _moved(model: ModelSpec, held: Shards, place: Place, layout: Layout) -> int:
    """Elements per slot that a unit at a place needs and its devices do not hold."""
    total = 0
    for rank, device in enumerate(place):
        mine = (layout, rank)
        total += shared_elements(model, mine, mine)
        if device in held:
            total -= shared_elements(model, held[device], mine)
    return total


def _kept_elements(model: ModelSpec, candidate: InPlace) -> int:
    """Elements per slot that the new units need and their devices hold already."""
    held = _shards(candidate.parents)
    return sum(
        shared_elements(model, held[device], (candidate.layout, rank))
        for place in candidate.places
        for rank, device in enumerate(place)
        if device in held
    )
