"""The order of primitives: state, release-before-acquire, and one order on every device."""

from __future__ import annotations

from nereus_core.primitives import OpId, Primitive, ended
from nereus_core.transition.draft import Draft, Node
from nereus_core.transition.graph import Edge, EdgeKind
from nereus_core.transition.sequence import Sequencer
from nereus_core.transition.sharing import share_sources
from nereus_core.units import UnitMap
from nereus_core.workload import ModelStage


def ordered(
    ops: list[Primitive],
    alive: UnitMap,
    parked: UnitMap,
    stages: tuple[ModelStage, ...],
    prefix: str,
) -> tuple[tuple[Primitive, ...], tuple[Edge, ...]]:
    """Order primitives and number them in that order; returns them with their edges.

    Args:
        ops: Primitives without ids; an Extend names every unit that may serve as its source.
        alive: Units alive before.
        parked: Units parked before.
        stages: Model-stages in stage order.
        prefix: Of the ids given.
    """
    draft = Draft(ops, UnitMap([*alive.values(), *parked.values()]), stages)
    draft.add_state_edges()
    draft.add_release_edges()
    sequence = Sequencer(draft, {stage: len(alive.of(stage)) for stage in stages}).sequence()
    share_sources(draft, sequence)
    _add_device_edges(draft, sequence)
    place = {node: i for i, node in enumerate(sequence)}
    ids = {node: OpId(f"{prefix}/{i}") for node, i in place.items()}
    nodes = draft.nodes
    edges = [
        Edge(ids[first], ids[node], *nodes[node].waits[first])
        for node in sequence
        for first in sorted(nodes[node].waits, key=place.__getitem__)
    ]
    return tuple(nodes[node].named(ids[node]) for node in sequence), tuple(edges)


def _add_device_edges(draft: Draft, sequence: list[int]) -> None:
    """Order primitives that share a device as the sequence does; drop edges others imply.

    Release edges all stay: they are what a reader of the graph asks for.
    """
    touch: list[int] = []
    ancestors: list[int] = []
    seen = 0
    place = {node: i for i, node in enumerate(sequence)}
    for i, name in enumerate(sequence):
        node = draft.nodes[name]
        mask = draft.union((*ended(node.op), *node.reads)) | node.acquires
        known = 0
        for first in node.waits:
            known |= ancestors[place[first]] | 1 << place[first]
        unordered, j = mask & seen, i
        while unordered:
            j -= 1
            shared = touch[j] & unordered
            if shared and not known >> j & 1:
                node.waits[sequence[j]] = (EdgeKind.ORDER, f"both use {draft.names(shared)}")
                known |= ancestors[j] | 1 << j
            unordered &= ~shared
        touch.append(mask)
        ancestors.append(known)
        seen |= mask
        _drop_implied(node, ancestors, place)


def _drop_implied(node: Node, ancestors: list[int], place: dict[int, int]) -> None:
    covered = 0
    for first in sorted(node.waits, key=place.__getitem__, reverse=True):
        if covered >> place[first] & 1 and node.waits[first][0] is not EdgeKind.RELEASE:
            del node.waits[first]
        covered |= ancestors[place[first]]
