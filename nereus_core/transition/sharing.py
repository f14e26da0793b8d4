"""Which Extend reads which units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nereus_core.transition.roster import Place


def shared(pool: Sequence[int], targets: Sequence[int], places: Sequence[Place]) -> list[list[int]]:
    """Share sources out among units to be extended, so that these are built at once.

    One target alone is striped over all sources. Each source goes to one target, the nearest of
    those that have fewest: one it shares a device with, else a node. Where targets outnumber
    sources, units just built serve the next ones, so that n sources build k targets in
    log2((n + k) / n) rounds, rounded up.

    Returns:
        The sources of every target, in order of the pool.
    """
    if len(targets) == 1:
        return [list(pool)]
    found: list[list[int]] = []
    sources = list(pool)
    while len(found) < len(targets):
        batch = targets[len(found) : len(found) + len(sources)]
        found += _dealt(sources, batch, places)
        sources += batch
    return found


def _dealt(
    sources: Sequence[int], targets: Sequence[int], places: Sequence[Place]
) -> list[list[int]]:
    """Deal sources, at least as many as targets, evenly."""
    shares: list[list[int]] = [[] for _ in targets]
    quota = len(sources) // len(targets)
    left: Sequence[int] = sources
    for where in (_devices, _nodes):
        by_spot: dict[object, list[int]] = {}
        for i, target in enumerate(targets):
            for spot in where(places[target]):
                by_spot.setdefault(spot, []).append(i)
        far = []
        for unit in left:
            spots = where(places[unit])
            near = set[int]()
            if not by_spot.keys().isdisjoint(spots):
                near.update(*[by_spot[spot] for spot in spots if spot in by_spot])
            i = min(near, key=lambda i: (len(shares[i]), i)) if near else -1
            if i >= 0 and len(shares[i]) < quota:
                shares[i].append(unit)
            else:
                far.append(unit)
        left = far
    # The rest to those that have fewest.
    hungry = (share for rank in range(quota + 1) for share in shares if len(share) <= rank)
    for unit, share in zip(left, hungry, strict=False):  # either may be at its end
        share.append(unit)
    if len(sources) > len(targets):
        turn = {unit: i for i, unit in enumerate(sources)}
        for share in shares:
            share.sort(key=turn.__getitem__)
    return shares


def _devices(place: Place) -> Iterable[object]:
    return place


def _nodes(place: Place) -> Iterable[object]:
    return {d.node for d in place}
