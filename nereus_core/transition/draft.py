"""Primitives and the edges between them, in the making: state and release-before-acquire.

Devices that every unit takes or leaves together are one *atom*, and a set of atoms is an integer:
a transition at thousands of devices has to be ordered in milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from nereus_core.cluster import Device
from nereus_core.primitives import Destroy, Extend, Kind, Merge, OpId, Primitive, Split
from nereus_core.transition.graph import EdgeKind
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ModelStage


@dataclass(slots=True)
class Node:
    """A primitive while its place in the order is sought; in a draft named by its index."""

    kind: Kind
    stage: int
    """Position of its model-stage in stage order."""
    ended: tuple[Unit, ...] = ()
    made: tuple[Unit, ...] = ()
    reads: list[Unit] = field(default_factory=list)
    """Sources of an Extend, in order; none: the origin."""
    park: bool = False
    staging_bytes: int | None = None
    waits: dict[int, tuple[EdgeKind, str]] = field(default_factory=dict)
    """Nodes that must precede it, and why."""
    takes: int = 0
    """Atoms of the units it makes."""
    leaves: int = 0
    """Atoms of the units it ends."""

    @property
    def destroys(self) -> bool:
        """Whether it is a Destroy."""
        return self.kind is Kind.DESTROY

    def named(self, op_id: OpId) -> Primitive:
        """Return the primitive as it was ordered."""
        if self.kind is Kind.EXTEND:
            return Extend(op_id, tuple([u.id for u in self.reads]), self.made[0])
        if self.kind is Kind.DESTROY:
            return Destroy(op_id, self.ended[0].id, self.park)
        if self.kind is Kind.SPLIT:
            return Split(op_id, self.ended[0].id, self.made, self.staging_bytes)
        return Merge(op_id, tuple([u.id for u in self.ended]), self.made[0], self.staging_bytes)


class Draft:
    """Nodes, named by their index, and what the steps of ordering share."""

    def __init__(
        self,
        nodes: list[Node],
        pools: Sequence[Sequence[Unit]],
        stages: tuple[ModelStage, ...],
    ) -> None:
        """Take nodes without edges and, by stage, the units that Extends may read.

        Model-stages are in stage order.
        """
        self.nodes, self.stages, self._pools = nodes, stages, pools
        units = {u.id: u for pool in pools for u in pool}
        for node in nodes:
            for unit in (*node.ended, *node.made):
                units[unit.id] = unit
        self.mask, self._atoms = _atoms(units.values())
        self._names: dict[int, str] = {}
        self.maker: dict[UnitId, int] = {}
        self.ender: dict[UnitId, int] = {}
        for i, node in enumerate(nodes):
            for unit in node.made:
                self.maker[unit.id] = i
                node.takes |= self.mask[unit.id]
            for unit in node.ended:
                self.ender[unit.id] = i
                node.leaves |= self.mask[unit.id]

    def pool(self, stage: int) -> Sequence[Unit]:
        """Units that Extends of a stage may read."""
        return self._pools[stage]

    def touches(self, node: Node) -> int:
        """Atoms that take part: of units ended, made and read."""
        found = node.takes | node.leaves
        for unit in node.reads:
            found |= self.mask[unit.id]
        return found

    def add_state_edges(self) -> None:
        """A unit is made before it is read or changed further, and read before it ends."""
        for i, node in enumerate(self.nodes):
            for unit in node.ended:
                if (maker := self.maker.get(unit.id)) is not None:
                    node.waits[maker] = (EdgeKind.STATE, f"goes on from {unit.id}")
            for unit in node.reads:
                self.add_reading(i, unit)

    def add_reading(self, reader: int, unit: Unit) -> None:
        """Put an Extend after the maker of a unit it reads, and before its end."""
        name = unit.id
        if (maker := self.maker.get(name)) is not None:
            self.nodes[reader].waits[maker] = (EdgeKind.STATE, f"reads {name}")
        if (ender := self.ender.get(name)) is not None:
            if self.nodes[ender].park:
                text = f"reads {name}, parked in host memory"
                self.nodes[reader].waits[ender] = (EdgeKind.STATE, text)
            else:
                text = f"{name} is read before it ends"
                self.nodes[ender].waits[reader] = (EdgeKind.STATE, text)

    def add_release_edges(self) -> None:
        """A device that one unit leaves and another takes is released before it is acquired.

        Between stages that holds for devices that one stage leaves and another comes to; stages
        that share a device, before or after, share it also meanwhile.
        """
        comes, leaves = [0] * len(self.stages), [0] * len(self.stages)
        releasers: dict[int, list[tuple[int, int]]] = {}
        for i, node in enumerate(self.nodes):
            comes[node.stage] |= node.takes & ~node.leaves
            if released := node.leaves & ~node.takes:
                leaves[node.stage] |= released
                for bit in bits(released):
                    releasers.setdefault(bit, []).append((i, node.stage))
        for i, node in enumerate(self.nodes):
            acquired = node.takes & ~node.leaves
            by_node: dict[int, int] = {}
            for bit in bits(acquired):
                for first, stage in releasers.get(bit, ()):
                    if stage == node.stage or not bit & (comes[stage] | leaves[node.stage]):
                        by_node[first] = by_node.get(first, 0) | bit
            for first, shared in by_node.items():
                if self._goes_on_from(first, i):
                    continue  # what it releases is what this node acquires first
                by, to = self.stages[self.nodes[first].stage], self.stages[node.stage]
                text = f"{self.names(shared)} released by {by}, acquired by {to}"
                node.waits.setdefault(first, (EdgeKind.RELEASE, text))

    def _goes_on_from(self, later: int, earlier: int) -> bool:
        """Whether a node ends what another made, or what was made of that."""
        makers = (self.maker.get(unit.id) for unit in self.nodes[later].ended)
        return any(
            maker is not None and (maker == earlier or self._goes_on_from(maker, earlier))
            for maker in makers
        )

    def names(self, mask: int) -> str:
        """Spell devices, three at most."""
        if mask not in self._names:
            found = [d for bit in bits(mask) for d in self._atoms[bit]]
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            self._names[mask] = ", ".join(map(str, found[:3])) + more
        return self._names[mask]


def _atoms(units: Collection[Unit]) -> tuple[dict[UnitId, int], dict[int, list[Device]]]:
    """Return the atoms of every unit, one bit each, and the devices of every atom."""
    groups = {id(unit.devices): unit.devices for unit in units}  # stages that share them, once
    owners: dict[Device, int] = {}
    names = 0
    for devices in groups.values():
        renamed: dict[int, int] = {}  # devices that were together, and are in this unit, stay so
        for device in devices:
            before = owners.get(device, 0)
            after = renamed.get(before)
            if after is None:
                names += 1
                renamed[before] = after = names
            owners[device] = after
    bit_of: dict[int, int] = {}
    atoms: dict[int, list[Device]] = {}
    for device, key in owners.items():
        bit = bit_of.setdefault(key, 1 << len(bit_of))
        atoms.setdefault(bit, []).append(device)
    masks: dict[int, int] = {}
    for group, devices in groups.items():
        mask = 0
        for key in {owners[device] for device in devices}:
            mask |= bit_of[key]
        masks[group] = mask
    return {unit.id: masks[id(unit.devices)] for unit in units}, atoms


def bits(mask: int) -> Iterator[int]:
    """Yield the powers of two that a mask consists of."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
