"""Which Extend reads which units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

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
    left = _dealt_near(sources, targets, places, shares, quota)
    # The rest to those that have fewest.
    hungry = (share for rank in range(quota + 1) for share in shares if len(share) <= rank)
    for unit, share in zip(left, hungry, strict=False):  # either may be at its end
        share.append(unit)
    if len(sources) > len(targets):
        turn = {unit: i for i, unit in enumerate(sources)}
        for share in shares:
            share.sort(key=turn.__getitem__)
    return shares


def _dealt_near(
    sources: Sequence[int],
    targets: Sequence[int],
    places: Sequence[Place],
    shares: list[list[int]],
    quota: int,
) -> Sequence[int]:
    """Deal sources to targets they share a device with, then a node; return those left over."""
    if _nodes(targets, places).isdisjoint(_nodes(sources, places)):
        return sources  # nothing is near
    by_node: dict[str, list[int]] = {}
    for i, target in enumerate(targets):
        for node in _nodes([target], places):
            by_node.setdefault(node, []).append(i)
    by_device = {d: (i,) for i, target in enumerate(targets) for d in places[target]}

    def deal(unit: int, near: Iterable[Iterable[int]]) -> bool:
        """Give a unit to the first of those that have fewest, unless these have enough."""
        i = min(set(chain(*near)), key=lambda i: (len(shares[i]), i))
        hungry = len(shares[i]) < quota
        if hungry:
            shares[i].append(unit)
        return hungry

    far = []
    for unit in sources:
        near_devices = [by_device[d] for d in places[unit] if d in by_device]
        if not (near_devices and deal(unit, near_devices)):
            far.append(unit)
    left = []
    for unit in far:
        near = [by_node[node] for node in _nodes([unit], places) if node in by_node]
        if not (near and deal(unit, near)):
            left.append(unit)
    return left


def _nodes(units: Iterable[int], places: Sequence[Place]) -> set[str]:
    return {device.node for unit in units for device in places[unit]}
