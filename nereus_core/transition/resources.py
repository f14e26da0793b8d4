"""The order of primitives: state, release-before-acquire, and one order on every device.

Sets of devices are integers here, one bit per device: a transition at a thousand devices has to be
ordered in milliseconds.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from nereus_core.cluster import Device
from nereus_core.errors import CycleError
from nereus_core.primitives import (
    Destroy,
    Extend,
    OpId,
    Primitive,
    created,
    ended,
    model_stage_of,
)
from nereus_core.transition.graph import Edge, EdgeKind
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import ModelStage


@dataclass(slots=True)
class _Node:
    """A primitive while its place in the order is sought; nodes are named by their index."""

    op: Primitive
    stage: ModelStage
    rank: tuple[bool, int]
    """Among primitives that may go next the least does: destroys last, else in stage order."""
    acquires: int
    releases: int
    reads: dict[UnitId, None]
    """Sources of an Extend, in order."""
    waits: dict[int, tuple[EdgeKind, str]] = field(default_factory=dict)
    """Nodes that must precede it, and why."""

    def named(self, op_id: OpId) -> Primitive:
        """Return the primitive as it was ordered."""
        if isinstance(self.op, Extend):
            return replace(self.op, op_id=op_id, sources=tuple(self.reads))
        return replace(self.op, op_id=op_id)


def ordered(
    ops: list[Primitive],
    alive: UnitMap,
    parked: UnitMap,
    stages: tuple[ModelStage, ...],
    prefix: str,
) -> tuple[tuple[Primitive, ...], tuple[Edge, ...]]:
    """Order primitives and number them in that order; returns them with their edges.

    Primitives that wait for one another in a circle always do so through a Destroy that waits until
    an Extend has read its unit. That Destroy goes first instead: as it is, when the stage has
    another unit to read (an executable Destroy); else parked, so that the Extend reads what host
    memory keeps.

    Args:
        ops: Primitives without ids; an Extend names every unit that may serve as its source.
        alive: Units alive before.
        parked: Units parked before.
        stages: Model-stages in stage order.
        prefix: Of the ids given.
    """
    order = _Order(ops, alive, parked, stages)
    order.add_state_edges()
    order.add_release_edges()
    sequence = order.sequence()
    order.share_sources(sequence)
    order.add_device_edges(sequence)
    place = {node: i for i, node in enumerate(sequence)}
    ids = {node: OpId(f"{prefix}/{i}") for node, i in place.items()}
    nodes = order.nodes
    edges = [
        Edge(ids[first], ids[node], *nodes[node].waits[first])
        for node in sequence
        for first in sorted(nodes[node].waits, key=place.__getitem__)
    ]
    return tuple(nodes[node].named(ids[node]) for node in sequence), tuple(edges)


class _Order:
    """Nodes and the edges between them, in the making."""

    def __init__(
        self,
        ops: list[Primitive],
        alive: UnitMap,
        parked: UnitMap,
        stages: tuple[ModelStage, ...],
    ) -> None:
        units = [*alive.values(), *parked.values(), *(u for op in ops for u in created(op))]
        self.devices: tuple[Device, ...] = tuple(dict.fromkeys(d for u in units for d in u.devices))
        bit = {device: 1 << i for i, device in enumerate(self.devices)}
        self.mask = {u.id: sum(bit[d] for d in u.devices) for u in units}
        node_bit = {n: 1 << i for i, n in enumerate(dict.fromkeys(d.node for d in self.devices))}
        self.node_mask = {
            u.id: sum(node_bit[name] for name in {d.node for d in u.devices}) for u in units
        }
        stage_order = {stage: i for i, stage in enumerate(stages)}
        self.nodes = [self._node(op, stage_order) for op in ops]
        self.maker = {u.id: i for i, node in enumerate(self.nodes) for u in created(node.op)}
        self.ender = {u: i for i, n in enumerate(self.nodes) for u in ended(n.op) if _destroys(n)}
        self.standing = {stage: len(alive.of(stage)) for stage in stages}
        """Units of a stage that are there whatever goes first."""
        self.freed: dict[ModelStage, list[int]] = {stage: [] for stage in stages}
        """Destroys of a stage that go first as they are."""

    def _node(self, op: Primitive, stage_order: dict[ModelStage, int]) -> _Node:
        stage = model_stage_of(op)
        makes = self._union(u.id for u in created(op))
        ends = self._union(ended(op))
        rank = (isinstance(op, Destroy), stage_order[stage])
        reads = dict.fromkeys(op.sources if isinstance(op, Extend) else ())
        return _Node(op, stage, rank, makes & ~ends, ends & ~makes, reads)

    def _union(self, units: Iterator[UnitId] | tuple[UnitId, ...]) -> int:
        found = 0
        for unit in units:
            found |= self.mask[unit]
        return found

    def add_state_edges(self) -> None:
        """A unit is made before it is read, and read before it is destroyed."""
        maker, ender = self.maker, self.ender
        first_read = {unit: (EdgeKind.STATE, f"{unit} is read before it ends") for unit in ender}
        for i, node in enumerate(self.nodes):
            for unit in node.reads:
                if unit in maker:
                    node.waits[maker[unit]] = (EdgeKind.STATE, f"reads {unit}")
                if unit in ender:
                    self.nodes[ender[unit]].waits[i] = first_read[unit]

    def add_release_edges(self) -> None:
        """A device that one unit leaves and another takes is released before it is acquired.

        Between stages that holds for devices that one stage leaves and another comes to; stages
        that share a device, before or after, share it also meanwhile.
        """
        comes: dict[ModelStage, int] = defaultdict(int)
        leaves: dict[ModelStage, int] = defaultdict(int)
        releaser: dict[ModelStage, dict[int, int]] = defaultdict(dict)
        for i, node in enumerate(self.nodes):
            comes[node.stage] |= node.acquires
            leaves[node.stage] |= node.releases
            releaser[node.stage].update(dict.fromkeys(_bits(node.releases), i))
        for node in self.nodes:
            for stage, left in leaves.items():
                blocked = node.acquires & left
                if stage != node.stage:
                    blocked &= ~comes[stage] & ~leaves[node.stage]
                by_node: dict[int, int] = defaultdict(int)
                for bit in _bits(blocked):
                    by_node[releaser[stage][bit]] |= bit
                for first, shared in by_node.items():
                    text = f"{self._names(shared)} released by {stage}, acquired by {node.stage}"
                    node.waits[first] = (EdgeKind.RELEASE, text)

    def sequence(self) -> list[int]:
        """Return the nodes in an order that keeps every edge, least rank first.

        A Destroy that nothing waits for comes after everything else.

        Raises:
            CycleError: a circle that no Destroy can open.
        """
        open_waits = [set(node.waits) for node in self.nodes]
        wakes: list[set[int]] = [set() for _ in self.nodes]
        for i, waits in enumerate(open_waits):
            for first in waits:
                wakes[first].add(i)
        last = [i for i, node in enumerate(self.nodes) if _destroys(node) and not wakes[i]]
        early = set(range(len(self.nodes))) - set(last)
        ready = [(self.nodes[i].rank, i) for i in early if not open_waits[i]]
        heapq.heapify(ready)
        done: list[int] = []
        while len(done) < len(early):
            if not ready:
                freed = self._choose(_circle(open_waits))
                self._let_go(freed, open_waits, wakes)
                ready.append((self.nodes[freed].rank, freed))
            node = heapq.heappop(ready)[1]
            done.append(node)
            for woken in sorted(wakes[node]):
                open_waits[woken].discard(node)
                if not open_waits[woken] and woken in early:
                    heapq.heappush(ready, (self.nodes[woken].rank, woken))
        return [*done, *sorted(last, key=lambda i: self.nodes[i].rank)]

    def _choose(self, circle: list[int]) -> int:
        """Pick the Destroy that opens a circle: one that need not be parked, if there is one."""
        destroys = [i for i in circle if _destroys(self.nodes[i])]
        if not destroys:
            raise CycleError([self.nodes[i].op for i in [*circle, circle[0]]])
        return min(destroys, key=lambda i: (self.standing[self.nodes[i].stage] == 1, i))

    def _let_go(self, freed: int, open_waits: list[set[int]], wakes: list[set[int]]) -> None:
        """Put a Destroy before the Extends it waits for: they read others, or what it parks."""
        node = self.nodes[freed]
        assert isinstance(node.op, Destroy)
        park = self.standing[node.stage] == 1
        self.standing[node.stage] -= 1
        node.op = replace(node.op, park=park)
        for reader in sorted(open_waits[freed]):
            del node.waits[reader]
            wakes[reader].discard(freed)
            if park:
                text = f"reads {node.op.unit}, parked in host memory"
                self.nodes[reader].waits.setdefault(freed, (EdgeKind.STATE, text))
                open_waits[reader].add(freed)
                wakes[freed].add(reader)
            else:
                del self.nodes[reader].reads[node.op.unit]
        for other in self.freed[node.stage] if park else ():  # all of them have their place
            node.waits[other] = (
                EdgeKind.STATE,
                f"{node.op.unit} stands until the others have gone",
            )
        if not park:
            self.freed[node.stage].append(freed)
        open_waits[freed].clear()

    def share_sources(self, sequence: list[int]) -> None:
        """Share the sources of a stage out among its Extends, so that these run at once.

        One Extend alone is striped over all of them. Each source goes to the Extend that has
        fewest, the nearest of these; with more Extends than sources, a source serves several.
        """
        by_pool: dict[tuple[ModelStage, tuple[UnitId, ...]], list[int]] = defaultdict(list)
        for i in sequence:
            node = self.nodes[i]
            if node.reads:
                by_pool[node.stage, tuple(node.reads)].append(i)
        for (_, pool), extends in by_pool.items():
            if len(extends) > 1:
                for i, share in self._shares(pool, extends).items():
                    self._read_only(i, share)

    def _shares(self, pool: tuple[UnitId, ...], extends: list[int]) -> dict[int, list[UnitId]]:
        """Deal sources to Extends evenly; every one of either has at least one of the other."""

        def nearness(unit: UnitId, extend: int) -> tuple[int, int]:
            """Devices, then nodes, that both sides have in common."""
            target = created(self.nodes[extend].op)[0].id
            return (
                (self.mask[unit] & self.mask[target]).bit_count(),
                (self.node_mask[unit] & self.node_mask[target]).bit_count(),
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

    def _read_only(self, extend: int, share: list[UnitId]) -> None:
        """Narrow an Extend to some of its sources, and drop the edges of the others."""
        node = self.nodes[extend]
        needed = {self.maker.get(u, self.ender.get(u)) for u in share}
        for unit in node.reads.keys() - set(share):
            other = self.maker.get(unit, self.ender.get(unit))
            if other is None or other in needed:
                continue
            for waiting, first in ((extend, other), (other, extend)):
                kind, _ = self.nodes[waiting].waits.get(first, (None, ""))
                if kind is EdgeKind.STATE:
                    del self.nodes[waiting].waits[first]
        node.reads = dict.fromkeys(share)

    def add_device_edges(self, sequence: list[int]) -> None:
        """Order primitives that share a device as the sequence does; drop edges others imply.

        Release edges all stay: they are what a reader of the graph asks for.
        """
        touch: list[int] = []
        ancestors: list[int] = []
        seen = 0
        place = {node: i for i, node in enumerate(sequence)}
        for i, name in enumerate(sequence):
            node = self.nodes[name]
            mask = self._union((*ended(node.op), *node.reads)) | node.acquires
            known = 0
            for first in node.waits:
                known |= ancestors[place[first]] | 1 << place[first]
            unordered, j = mask & seen, i
            while unordered:
                j -= 1
                shared = touch[j] & unordered
                if shared and not known >> j & 1:
                    node.waits[sequence[j]] = (EdgeKind.ORDER, f"both use {self._names(shared)}")
                    known |= ancestors[j] | 1 << j
                unordered &= ~shared
            touch.append(mask)
            ancestors.append(known)
            seen |= mask
            self._drop_implied(node, ancestors, place)

    def _drop_implied(self, node: _Node, ancestors: list[int], place: dict[int, int]) -> None:
        covered = 0
        for first in sorted(node.waits, key=place.__getitem__, reverse=True):
            if covered >> place[first] & 1 and node.waits[first][0] is not EdgeKind.RELEASE:
                del node.waits[first]
            covered |= ancestors[place[first]]

    def _names(self, mask: int) -> str:
        found = [str(self.devices[bit.bit_length() - 1]) for bit in _bits(mask)]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(found[:3]) + more


def _destroys(node: _Node) -> bool:
    return isinstance(node.op, Destroy)


def _bits(mask: int) -> Iterator[int]:
    """Yield the powers of two that a mask consists of."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _circle(open_waits: list[set[int]]) -> list[int]:
    """Follow open waits, the least first, until a node comes again; return the circle."""
    path: dict[int, None] = {}
    node = next(i for i, waits in enumerate(open_waits) if waits)
    while node not in path:
        path[node] = None
        node = min(open_waits[node])
    nodes = list(path)
    return nodes[nodes.index(node) :]
