"""Primitives and the edges between them, in the making: state and release-before-acquire.

Sets of devices are integers here, one bit per device: a transition at a thousand devices has to be
ordered in milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from nereus_core.cluster import Device
from nereus_core.primitives import (
    Destroy,
    Extend,
    OpId,
    Primitive,
    created,
    ended,
    model_stage_of,
)
from nereus_core.transition.graph import EdgeKind
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import ModelStage


@dataclass(slots=True)
class Node:
    """A primitive while its place in the order is sought; in a draft named by its index."""

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

    @property
    def destroys(self) -> bool:
        """Whether it is a Destroy."""
        return isinstance(self.op, Destroy)

    def named(self, op_id: OpId) -> Primitive:
        """Return the primitive as it was ordered."""
        if isinstance(self.op, Extend):
            return replace(self.op, op_id=op_id, sources=tuple(self.reads))
        return replace(self.op, op_id=op_id)


class Draft:
    """Nodes, named by their index, and what the steps of ordering share."""

    def __init__(
        self,
        ops: list[Primitive],
        before: UnitMap,
        stages: tuple[ModelStage, ...],
    ) -> None:
        units = [*before.values(), *(u for op in ops for u in created(op))]
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
        self.ender = {u: i for i, n in enumerate(self.nodes) for u in ended(n.op) if n.destroys}

    def _node(self, op: Primitive, stage_order: dict[ModelStage, int]) -> Node:
        stage = model_stage_of(op)
        makes = self.union(u.id for u in created(op))
        ends = self.union(ended(op))
        rank = (isinstance(op, Destroy), stage_order[stage])
        reads = dict.fromkeys(op.sources if isinstance(op, Extend) else ())
        return Node(op, stage, rank, makes & ~ends, ends & ~makes, reads)

    def union(self, units: Iterable[UnitId]) -> int:
        """Devices of units."""
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
                    text = f"{self.names(shared)} released by {stage}, acquired by {node.stage}"
                    node.waits[first] = (EdgeKind.RELEASE, text)

    def names(self, mask: int) -> str:
        """Spell devices, three at most."""
        found = [str(self.devices[bit.bit_length() - 1]) for bit in _bits(mask)]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(found[:3]) + more


def _bits(mask: int) -> Iterator[int]:
    """Yield the powers of two that a mask consists of."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
