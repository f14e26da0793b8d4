"""Match the units of one model-stage to their places in a target, keeping most bytes in place."""

from __future__ import annotations

from collections.abc import Mapping

from nereus_core.cluster import Device
from nereus_core.cost.transition import shared_elements
from nereus_core.layout import Layout, layouts
from nereus_core.model import ModelSpec
from nereus_core.plan import Placement
from nereus_core.transition.matched import Held, InPlace, Match
from nereus_core.transition.roster import Place

_EXACT = 12
"""Candidates that compete are packed exactly up to this number of them, else greedily: 2^12 steps
at most. Chosen, not measured."""

_BRIDGE = 0.9
"""A bridge is two primitives where an Extend is one, so it has to save a tenth of the bytes.
Chosen, not measured."""


def match(
    model: ModelSpec,
    units: Held,
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
    Units may have several layouts: a transition that failed part-way leaves such. No two of them
    share a device.
    """
    layout, free_places = target.layout, dict.fromkeys(target.units)
    kept, left = [], []
    for unit, place in enumerate(units.places):
        found = units.layouts[unit]
        if (found is layout or found == layout) and place in free_places:
            kept.append(unit)
            del free_places[place]
        else:
            left.append(unit)
    if not left or not free_places:
        return Match(tuple(kept), (), tuple(free_places), tuple(left))
    candidates = _candidates(units, left, list(free_places), layout)
    if not (splits and merges):
        candidates = [c for c in candidates if (splits if c.is_split else merges)]
    chosen = _packed(model, units, candidates) if _compete(candidates) else candidates
    used = {parent for c in chosen for parent in c.parents}
    filled = [place for c in chosen for place in c.places]
    if len(filled) == len(free_places):
        assert len(set(map(id, filled))) == len(filled), "two units of a stage share a device"
        free_places.clear()
    else:
        for place in filled:
            del free_places[place]
    left = [unit for unit in left if unit not in used]
    if splits and merges and left and free_places:
        for bridge in _bridges(model, units, left, list(free_places), layout):
            if bridge.bridge_to in free_places and used.isdisjoint(bridge.parents):
                chosen.append(bridge)
                del free_places[bridge.bridge_to]
                used.update(bridge.parents)
        left = [unit for unit in left if unit not in used]
    for change in chosen:
        if not change.left:
            change.note_devices(units)
    return Match(tuple(kept), tuple(chosen), tuple(free_places), tuple(left))


def _candidates(units: Held, left: list[int], places: list[Place], layout: Layout) -> list[InPlace]:
    """List every Split, growth and Merge between these units and places."""
    taker: dict[Device, int] = {}
    starts = {place[0]: place for place in places}
    found: list[InPlace] = []
    inside: set[int] = set()
    touched: set[int] = set()
    for unit in left:
        own = units.places[unit]
        into = _cut_in_order(own, starts)
        if into:
            found.append(InPlace((unit,), into, layout, True, None, own, own))
        else:
            taker = taker or {d: i for i, place in enumerate(places) for d in place}
            shared = _counted(own, taker)
            touched.update(shared)
            cut = [i for i, n in shared.items() if n == len(places[i])]
            inside.update(cut)
            if cut:
                found.append(InPlace((unit,), tuple([places[i] for i in cut]), layout, True))
    if touched <= inside:  # a place inside one unit is that one's alone
        return found
    holder = {d: unit for unit in left for d in units.places[unit]}
    for i in sorted(touched - inside):
        place = places[i]
        shared = _counted(place, holder)
        touching = list(shared)
        covered = len(touching) > 1 and sum(shared.values()) == len(place)
        if covered and len({units.layouts[unit] for unit in touching}) == 1:
            found.append(InPlace(tuple(touching), (place,), layout, False))
        found += [
            InPlace((unit,), (place,), layout, False)
            for unit, n in shared.items()
            if n == len(units.places[unit]) < len(place)
        ]
    return found


def _cut_in_order(devices: Place, starts: Mapping[Device, Place]) -> tuple[Place, ...]:
    """Return the places that devices consist of, one after another; () where they do not.

    So it is with most changes of layout, and it takes a look at each place, not at each device.
    """
    found: list[Place] = []
    at, end = 0, len(devices)
    while at < end:
        place = starts.get(devices[at])
        if place is None:
            return ()
        start, at = at, at + len(place)
        if devices[start:at] != place:
            return ()
        found.append(place)
    return tuple(found)


def _counted(devices: Place, owner: Mapping[Device, int]) -> dict[int, int]:
    """Count devices by owner, in order; those without one are left out."""
    found: dict[int, int] = {}
    for device in devices:
        i = owner.get(device)
        if i is not None:
            found[i] = found.get(i, 0) + 1
    return found


def _compete(candidates: list[InPlace]) -> bool:
    """Whether two want one unit or place; places are of one list, so that identity tells."""
    if all(c.is_split for c in candidates):
        return False  # each of another unit, which holds its places alone
    parents = [unit for c in candidates for unit in c.parents]
    places = [id(p) for c in candidates for p in c.places]
    return len(parents) > len(set(parents)) or len(places) > len(set(places))


def _packed(model: ModelSpec, units: Held, candidates: list[InPlace]) -> list[InPlace]:
    """Choose candidates that share no unit and no place and keep most, each for places left."""
    chosen: list[InPlace] = []
    for group in _rivals(candidates):
        group.sort(key=lambda c: -_kept_elements(model, units, c))
        if len(group) <= _EXACT:
            chosen += _best(model, units, group, frozenset())[1]
        else:
            taken: frozenset[object] = frozenset()
            for candidate in group:
                if cut := _cut(candidate, taken):
                    chosen.append(cut)
                    taken |= {*cut.parents, *cut.places}
    return chosen


def _rivals(candidates: list[InPlace]) -> list[list[InPlace]]:
    """Group candidates that compete, directly or through others; in order of the first of each."""
    groups: list[tuple[set[object], list[InPlace]]] = []
    for candidate in candidates:
        wants: set[object] = {*candidate.parents, *candidate.places}
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
    model: ModelSpec, units: Held, group: list[InPlace], taken: frozenset[object]
) -> tuple[int, list[InPlace]]:
    """Return the most elements that a choice keeps, and the choice; the first of equal ones."""
    if not group:
        return 0, []
    without = _best(model, units, group[1:], taken)
    cut = _cut(group[0], taken)
    if cut is None:
        return without
    kept, rest = _best(model, units, group[1:], taken | {*cut.parents, *cut.places})
    kept += _kept_elements(model, units, cut)
    return (kept, [cut, *rest]) if kept >= without[0] else without


def _cut(candidate: InPlace, taken: frozenset[object]) -> InPlace | None:
    """Leave out places that are taken; None when its units are, or nothing is left."""
    places = tuple(p for p in candidate.places if p not in taken)
    if not places or any(unit in taken for unit in candidate.parents):
        return None
    return InPlace(candidate.parents, places, candidate.layout, candidate.is_split)


def _bridges(
    model: ModelSpec, units: Held, left: list[int], places: list[Place], layout: Layout
) -> list[InPlace]:
    """List the bridges that move less than a unit built anew, those that save most first."""
    holder = {d: unit for unit in left for d in units.places[unit]}
    found: list[tuple[int, InPlace]] = []
    for place in places:
        touching = list(dict.fromkeys(holder[d] for d in place if d in holder))
        if not touching:
            continue
        anew = _moved(model, {}, place, layout)
        groups: list[tuple[int, ...]] = [(unit,) for unit in touching]
        if len(touching) > 1 and len({units.layouts[u] for u in touching}) == 1:
            groups.append(tuple(touching))
        for parents in groups:
            held = _shards(units, parents)
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


def _shards(units: Held, which: tuple[int, ...]) -> Shards:
    return {
        device: (units.layouts[unit], rank)
        for unit in which
        for rank, device in enumerate(units.places[unit])
    }


def _moved(model: ModelSpec, held: Shards, place: Place, layout: Layout) -> int:
    """Elements per slot that a unit at a place needs and its devices do not hold."""
    total = 0
    for rank, device in enumerate(place):
        mine = (layout, rank)
        total += shared_elements(model, mine, mine)
        if device in held:
            total -= shared_elements(model, held[device], mine)
    return total


def _kept_elements(model: ModelSpec, units: Held, candidate: InPlace) -> int:
    """Elements per slot that the new units need and their devices hold already."""
    held = _shards(units, candidate.parents)
    return sum(
        shared_elements(model, held[device], (candidate.layout, rank))
        for place in candidate.places
        for rank, device in enumerate(place)
        if device in held
    )
