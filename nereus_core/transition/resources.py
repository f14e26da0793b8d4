"""The order of primitives: state, release-before-acquire, memory, one order on every device."""

from __future__ import annotations

from collections.abc import Sequence

from nereus_core.primitives import Kind, OpId, Primitive
from nereus_core.transition.draft import Draft, Node, bits
from nereus_core.transition.graph import Edge, EdgeKind
from nereus_core.transition.room import Room, is_ample
from nereus_core.transition.schedule import soonest
from nereus_core.transition.sequence import Dismantle, Sequencer
from nereus_core.units import Unit, UnitMap
from nereus_core.workload import Job


def ordered(
    nodes: list[Node],
    pools: Sequence[Sequence[Unit]],
    alive: UnitMap,
    job: Job,
    prefix: str,
) -> tuple[tuple[Primitive, ...], tuple[Edge, ...]]:
    """Order primitives and number them in that order; returns them with their edges.

    Args:
        nodes: Primitives without edges.
        pools: By stage: units that its Extends may read.
        alive: Units alive before.
        job: The job they run: model-stages in stage order, shapes, capacity of a device.
        prefix: Of the ids given.

    Raises:
        Infeasible: new shards find no room on a device, whatever is staged or parked.
    """
    units = tuple(alive.values())
    standing = [alive.of(stage) for stage in job.workload.stages]
    tight = not is_ample(job, units, nodes)
    while True:
        draft = Draft(nodes, pools, job.workload.stages)
        draft.add_state_edges()
        draft.add_release_edges()
        sequencer = Sequencer(draft, standing, Room(job, units) if tight else None)
        try:
            sequence = sequencer.sequence()
            break
        except Dismantle as found:
            nodes = _dismantled(nodes, found.node)
    sequence = soonest(draft, sequence, alive, job, Room(job, units) if tight else None)
    _add_device_edges(draft, sequence, sequencer.squeezed)
    place = {node: i for i, node in enumerate(sequence)}
    ids = [OpId(f"{prefix}/{i}") for i in range(len(sequence))]
    edges = [
        Edge(ids[place[first]], op_id, *draft.nodes[node].waits[first])
        for op_id, node in zip(ids, sequence, strict=True)
        for first in sorted(draft.nodes[node].waits, key=place.__getitem__)
    ]
    ops = [draft.nodes[node].named(op_id) for op_id, node in zip(ids, sequence, strict=True)]
    return tuple(ops), tuple(edges)


def _dismantled(nodes: list[Node], which: int) -> list[Node]:
    """Park the units of a Split or Merge, and extend from host memory; forget edges and choices.

    A unit that an Extend makes only on the way to it is left out: what that reads is read instead.
    """
    ends = {unit.id for unit in nodes[which].ended}
    on_the_way = {
        node.made[0].id: node.reads
        for node in nodes
        if node.kind is Kind.EXTEND and node.made[0].id in ends
    }

    def read(units: Sequence[Unit]) -> list[Unit]:
        found = (other for unit in units for other in on_the_way.get(unit.id, [unit]))
        return list(dict.fromkeys(found))

    fresh: list[Node] = []
    for i, node in enumerate(nodes):
        if i == which:
            kept = [unit for unit in node.ended if unit.id not in on_the_way]
            fresh += [Node(Kind.DESTROY, node.stage, (unit,), park=True) for unit in kept]
            fresh += [
                Node(Kind.EXTEND, node.stage, made=(unit,), reads=read(node.ended))
                for unit in node.made
            ]
        elif not any(unit.id in on_the_way for unit in node.made):
            fresh.append(Node(node.kind, node.stage, node.ended, node.made, read(node.reads)))
    return fresh


def _add_device_edges(draft: Draft, sequence: list[int], squeezed: set[int]) -> None:
    """Order primitives that share a device as the sequence does; drop edges others imply.

    Each follows the last one before it on every device. Release edges all stay: they are what a
    reader of the graph asks for.
    """
    last: dict[int, int] = {}
    place = {node: i for i, node in enumerate(sequence)}
    ancestors: list[int] = []
    for i, name in enumerate(sequence):
        node = draft.nodes[name]
        shared: dict[int, int] = {}
        for bit in bits(draft.touches(node)):
            if bit in last:
                shared[last[bit]] = shared.get(last[bit], 0) | bit
            last[bit] = i
        known = 0
        for first in node.waits:
            known |= ancestors[place[first]] | 1 << place[first]
        for j in sorted(shared, reverse=True):
            if known >> j & 1:
                continue
            first, names = sequence[j], draft.names(shared[j])
            if name in squeezed and draft.nodes[first].leaves & shared[j]:
                reason = (EdgeKind.RELEASE, f"{names} has room for it then")
            else:
                reason = (EdgeKind.ORDER, f"both use {names}")
            node.waits[first] = reason
            known |= ancestors[j] | 1 << j
        ancestors.append(known)
        if len(node.waits) > 1:
            _drop_implied(node, ancestors, place)


def _drop_implied(node: Node, ancestors: list[int], place: dict[int, int]) -> None:
    covered = 0
    for first in sorted(node.waits, key=place.__getitem__, reverse=True):
        if covered >> place[first] & 1 and node.waits[first][0] is not EdgeKind.RELEASE:
            del node.waits[first]
        covered |= ancestors[place[first]]
