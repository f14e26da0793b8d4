"""Which Extend reads which units."""

from __future__ import annotations

from collections import defaultdict

from nereus_core.primitives import created
from nereus_core.transition.draft import Draft
from nereus_core.transition.graph import EdgeKind
from nereus_core.units import UnitId
from nereus_core.workload import ModelStage


def share_sources(draft: Draft, sequence: list[int]) -> None:
    """Share the sources of a stage out among its Extends, so that these run at once.

    One Extend alone is striped over all of them. Each source goes to the Extend that has
    fewest, the nearest of these; with more Extends than sources, a source serves several.
    """
    by_pool: dict[tuple[ModelStage, tuple[UnitId, ...]], list[int]] = defaultdict(list)
    for i in sequence:
        node = draft.nodes[i]
        if node.reads:
            by_pool[node.stage, tuple(node.reads)].append(i)
    for (_, pool), extends in by_pool.items():
        if len(extends) > 1:
            for i, share in _shares(draft, pool, extends).items():
                _read_only(draft, i, share)


def _shares(draft: Draft, pool: tuple[UnitId, ...], extends: list[int]) -> dict[int, list[UnitId]]:
    """Deal sources to Extends evenly; every one of either has at least one of the other."""

    def nearness(unit: UnitId, extend: int) -> tuple[int, int]:
        """Devices, then nodes, that both sides have in common."""
        target = created(draft.nodes[extend].op)[0].id
        return (
            (draft.mask[unit] & draft.mask[target]).bit_count(),
            (draft.node_mask[unit] & draft.node_mask[target]).bit_count(),
        )

    shares: dict[int, list[UnitId]] = {i: [] for i in extends}
    if len(pool) >= len(extends):
        for unit in pool:
            fewest = min(map(len, shares.values()))
            open_to = (i for i in extends if len(shares[i]) == fewest)
            shares[max(open_to, key=lambda i: nearness(unit, i))].append(unit)
        return shares
    served = dict.fromkeys(pool, 0)
    for i in extends:
        fewest = min(served.values())
        unit = max((u for u in pool if served[u] == fewest), key=lambda u: nearness(u, i))
        served[unit] += 1
        shares[i].append(unit)
    return shares


def _read_only(draft: Draft, extend: int, share: list[UnitId]) -> None:
    """Narrow an Extend to some of its sources, and drop the edges of the others."""
    node = draft.nodes[extend]
    needed = {draft.maker.get(u, draft.ender.get(u)) for u in share}
    for unit in node.reads.keys() - set(share):
        other = draft.maker.get(unit, draft.ender.get(unit))
        if other is None or other in needed:
            continue
        for waiting, first in ((extend, other), (other, extend)):
            kind, _ = draft.nodes[waiting].waits.get(first, (None, ""))
            if kind is EdgeKind.STATE:
                del draft.nodes[waiting].waits[first]
    node.reads = dict.fromkeys(share)
