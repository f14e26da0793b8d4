"""The order of primitives: state, release-before-acquire, memory, one order on every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from nereus_core.primitives import Kind, OpId, Primitive
from nereus_core.transition import reasons
from nereus_core.transition.draft import Draft, Node
from nereus_core.transition.graph import Edge, EdgeKind
from nereus_core.transition.reasons import Reason
from nereus_core.transition.room import Room
from nereus_core.transition.roster import Roster
from nereus_core.transition.schedule import soonest
from nereus_core.transition.sequence import Dismantle, Sequencer
from nereus_core.workload import Job


class Ordered:
    """Nodes of a draft in the order found: the steps of a graph, wrapped when they are read."""

    def __init__(
        self, draft: Draft, sequence: list[int], pairs: list[tuple[int, int]], prefix: str
    ) -> None:
        """Keep the draft, which does not change any more, as long as the graph lives.

        Op ids are ``prefix/0`` ...; pairs are the positions in the sequence that edges join.
        """
        self._draft, self._sequence, self._pairs, self._prefix = draft, sequence, pairs, prefix

    def pairs(self) -> Iterable[tuple[int, int]]:
        """See `graph.Steps`."""
        return self._pairs

    @cached_property
    def _ids(self) -> list[OpId]:
        return [OpId(f"{self._prefix}/{i}") for i in range(len(self._sequence))]

    @cached_property
    def ops(self) -> tuple[Primitive, ...]:
        """See `graph.Steps`."""
        numbered = zip(self._sequence, self._ids, strict=True)
        return tuple([self._draft.primitive(node, op_id) for node, op_id in numbered])

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """See `graph.Steps`."""
        return tuple([self._edge(first, then) for first, then in self._pairs])

    def _edge(self, first: int, then: int) -> Edge:
        before, after = self._sequence[first], self._sequence[then]
        kind = self._draft.waits[after][before][0]
        return Edge(self._ids[first], self._ids[then], kind, self._draft.spelled(before, after))


def ordered(
    nodes: list[Node],
    pools: Sequence[Sequence[int]],
    standing: Sequence[range],
    roster: Roster,
    job: Job,
    prefix: str,
    *,
    tight: bool,
) -> Ordered:
    """Order primitives and number them in that order.

    Args:
        nodes: Primitives without edges.
        pools: By stage: units that its Extends may read.
        standing: By stage: units alive before.
        roster: All units.
        job: The job they run: model-stages in stage order, shapes, capacity of a device.
        prefix: Of the ids given.
        tight: Whether memory has to be watched device by device.

    Raises:
        Infeasible: new shards find no room on a device, whatever is staged or parked.
    """
    room = Room(job, roster, standing) if tight else None
    while True:
        draft = Draft(nodes, pools, job.workload.stages, roster)
        draft.add_state_edges()
        draft.add_release_edges()
        sequencer = Sequencer(draft, standing, room and room.copy())
        try:
            sequence = sequencer.sequence()
            break
        except Dismantle as found:
            nodes = _dismantled(nodes, found.node, roster)
    sequence = soonest(draft, sequence, standing, job, room)
    pairs = _add_device_edges(draft, sequence, sequencer.squeezed)
    return Ordered(draft, sequence, pairs, prefix)


def _dismantled(nodes: list[Node], which: int, roster: Roster) -> list[Node]:
    """Park the units of a Split or Merge, and extend from host memory; forget edges and choices.

    A unit that an Extend makes only on the way to it is left out: what that reads is read instead.
    """
    ends, places = set(nodes[which].ended), roster.places
    on_the_way = {
        node.made[0]: node.reads
        for node in nodes
        if node.kind is Kind.EXTEND and node.made[0] in ends
    }

    def read(units: Sequence[int]) -> list[int]:
        found = (other for unit in units for other in on_the_way.get(unit, [unit]))
        return list(dict.fromkeys(found))

    fresh: list[Node] = []
    for i, node in enumerate(nodes):
        if i == which:
            kept = [unit for unit in node.ended if unit not in on_the_way]
            fresh += [
                Node(Kind.DESTROY, node.stage, (unit,), (), places[unit], (), park=True)
                for unit in kept
            ]
            fresh += [
                Node(Kind.EXTEND, node.stage, (), (unit,), (), places[unit], read(node.ended))
                for unit in node.made
            ]
        elif not any(unit in on_the_way for unit in node.made):
            fresh.append(replace(node, reads=read(node.reads), park=False, staging_bytes=None))
    return fresh


def _add_device_edges(
    draft: Draft, sequence: list[int], squeezed: set[int]
) -> list[tuple[int, int]]:
    """Order primitives that share a device as the sequence does; drop edges others imply.

    Each follows the last one before it on every device. Release edges all stay: they are what a
    reader of the graph asks for. Returns the positions that edges join, in order.
    """
    pairs: list[tuple[int, int]] = []
    last: dict[int, int] = {}
    place = [len(sequence)] * len(sequence)  # one that has no place yet: IndexError below
    ancestors: list[int] = []
    touches = draft.touches()
    for i, name in enumerate(sequence):
        place[name] = i
        waits = draft.waits.get(name, {})
        shared: dict[int, int] = {}
        rest = touches[name]
        while rest:
            bit = rest & -rest
            rest ^= bit
            before = last.get(bit)
            if before is not None:
                shared[before] = shared.get(before, 0) | bit
            last[bit] = i
        if not waits and not shared:
            ancestors.append(0)
            continue
        direct, above = [place[first] for first in waits] if waits else [], 0
        for j in direct:
            above |= ancestors[j]
        waits = draft.waits[name]
        for j in sorted(shared, reverse=True) if len(shared) > 1 else shared:
            if above >> j & 1 or j in direct:
                continue
            first = sequence[j]
            if name in squeezed and draft.leaves[first] & shared[j]:
                waits[first] = (EdgeKind.RELEASE, reasons.MAKES_ROOM, shared[j])
            else:
                waits[first] = (EdgeKind.ORDER, reasons.BOTH_USE, shared[j])
            above |= ancestors[j]
            direct.append(j)
        direct.sort()
        if above:
            direct = _without_implied(waits, above, direct, sequence)
        for j in direct:
            above |= 1 << j
            pairs.append((j, i))
        ancestors.append(above)
    return pairs


def _without_implied(
    waits: dict[int, Reason], above: int, places: list[int], sequence: list[int]
) -> list[int]:
    """Drop edges from nodes that are above others waited for; return the places of those left."""
    kept = []
    for j in places:
        first = sequence[j]
        if above >> j & 1 and waits[first][0] is not EdgeKind.RELEASE:
            del waits[first]
        else:
            kept.append(j)
    return kept
