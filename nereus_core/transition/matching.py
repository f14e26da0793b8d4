"""Match the units of one model-stage to their places in a target, keeping most bytes in place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nereus_core.cluster import Device
from nereus_core.cost.transition import shared_elements
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.plan import Placement
from nereus_core.units import Unit

Place = tuple[Device, ...]
"""Devices of one target unit, in order of local rank."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """Units that become others without leaving their devices: a Split, or a Merge."""

    parents: tuple[Unit, ...]
    places: tuple[Place, ...]

    @property
    def is_split(self) -> bool:
        """Whether it stays on the devices of one parent."""
        return len(self.parents) == 1 and all(
            set(place) <= set(self.parents[0].devices) for place in self.places
        )


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
    (Merge of one), or joining equal units that together cover a place (Merge). Exact, that is with
    the fewest bytes to fetch, whenever no two of these compete for a unit or a place: equal
    layouts, and splits and merges along whole units. Where they compete, the one that keeps most
    bytes goes first, ties by order. What is left over is surplus, or new.

    Without splits or merges (an adapter that cannot do them), what is not kept is surplus or new.
    Units may have several layouts: a transition that failed part-way leaves such.
    """
    free_places = dict.fromkeys(target.units)
    kept = tuple(u for u in units if u.layout == target.layout and u.devices in free_places)
    for unit in kept:
        del free_places[unit.devices]
    left = [u for u in units if u not in kept]
    chosen: list[InPlace] = []
    candidates = [
        candidate
        for candidate in _candidates(left, list(free_places))
        if (splits if candidate.is_split else merges)
    ]
    free_units = {u.id: u for u in left}
    if _compete(candidates):
        candidates.sort(key=lambda c: -_kept_elements(model, c, target.layout))
    for candidate in candidates:
        places = tuple(p for p in candidate.places if p in free_places)
        if not places or any(u.id not in free_units for u in candidate.parents):
            continue
        chosen.append(InPlace(candidate.parents, places))
        for unit in candidate.parents:
            del free_units[unit.id]
        for place in places:
            del free_places[place]
    return Match(kept, tuple(chosen), tuple(free_places), tuple(free_units.values()))


def _candidates(units: list[Unit], places: list[Place]) -> list[InPlace]:
    """List every Split, growth and Merge between these units and places."""
    holder = {d: i for i, unit in enumerate(units) for d in unit.devices}
    taker = {d: i for i, place in enumerate(places) for d in place}
    found: list[InPlace] = []
    for unit in units:
        shared = Counter(taker.get(d) for d in unit.devices)
        inside = [places[i] for i, n in shared.items() if i is not None and n == len(places[i])]
        if inside:
            found.append(InPlace((unit,), tuple(inside)))
    for place in places:
        shared = Counter(holder.get(d) for d in place)
        covered = shared.pop(None, 0) == 0
        touching = [units[i] for i in shared if i is not None]
        if len(touching) > 1 and covered and len({u.layout for u in touching}) == 1:
            found.append(InPlace(tuple(touching), (place,)))
        found += [
            InPlace((units[i],), (place,))
            for i, n in shared.items()
            if i is not None and n == len(units[i].devices) < len(place)
        ]
    return found


def _compete(candidates: list[InPlace]) -> bool:
    parents = [u.id for c in candidates for u in c.parents]
    places = [p for c in candidates for p in c.places]
    return len(parents) > len(set(parents)) or len(places) > len(set(places))


def _kept_elements(model: ModelSpec, candidate: InPlace, layout: Layout) -> int:
    """Elements per slot that the new units need and their devices hold already."""
    held = {d: (u.layout, rank) for u in candidate.parents for rank, d in enumerate(u.devices)}
    return sum(
        shared_elements(model, held[device], (layout, rank))
        for place in candidate.places
        for rank, device in enumerate(place)
        if device in held
    )
