"""Primitives and the edges between them, in the making: state and release-before-acquire."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import or_

from nereus_core.cluster import Device
from nereus_core.primitives import Destroy, Extend, Kind, Merge, OpId, Primitive, Split
from nereus_core.transition import reasons
from nereus_core.transition.atoms import Atoms, Group, bits
from nereus_core.transition.graph import EdgeKind
from nereus_core.transition.reasons import Reason
from nereus_core.transition.roster import Roster
from nereus_core.workload import ModelStage


@dataclass(slots=True)
class Node:
    """A primitive while its place in the order is sought; in a draft named by its index.

    Units are numbers of a `Roster`.
    """

    kind: Kind
    stage: int
    """Position of its model-stage in stage order."""
    ended: Sequence[int]
    made: Sequence[int]
    left: Group
    """Devices of the units it ends."""
    taken: Group
    """Devices of the units it makes: the same object where these are the same devices."""
    reads: Sequence[int] = ()
    """Sources of an Extend, in order; none: the origin."""
    park: bool = False
    staging_bytes: int | None = None


class Draft:
    """Nodes, named by their index, their edges, and what the steps of ordering share."""

    def __init__(
        self,
        nodes: list[Node],
        pools: Sequence[Sequence[int]],
        stages: tuple[ModelStage, ...],
        roster: Roster,
    ) -> None:
        """Take nodes without edges and, by stage, the units that Extends may read.

        Model-stages are in stage order.
        """
        self.nodes, self.stages, self.roster, self._pools = nodes, stages, roster, pools
        self.waits: defaultdict[int, dict[int, Reason]] = defaultdict(dict)
        """By node that waits: nodes that must precede it, and why."""
        self.maker: list[int | None] = [None] * len(roster)
        """By unit: the node that makes it."""
        self.ender: list[int | None] = [None] * len(roster)
        """By unit: the node that ends it."""
        self._passing: list[int] = []
        """Units made only on the way to others, which end them."""
        for i, node in enumerate(nodes):
            for unit in node.ended:
                self.ender[unit] = i
                if self.maker[unit] is not None:
                    self._passing.append(unit)
            for unit in node.made:
                self.maker[unit] = i
        read = [roster.places[unit] for unit in self._readable()]
        left = [node.left for node in nodes]
        moved = [node.taken for node in nodes if node.taken is not node.left]
        self._atoms = Atoms([*read, *left, *moved])
        masks = self._atoms.masks
        self.leaves = [masks[group] for group in left]
        """By node: atoms of the units it ends."""
        self.takes = [
            mask if node.taken is node.left else masks[node.taken]
            for node, mask in zip(nodes, self.leaves, strict=True)
        ]
        """By node: atoms of the units it makes."""

    def _readable(self) -> Iterable[int]:
        return chain.from_iterable({id(pool): pool for pool in self._pools}.values())

    def pool(self, stage: int) -> Sequence[int]:
        """Units that Extends of a stage may read."""
        return self._pools[stage]

    def touches(self) -> list[int]:
        """Atoms that take part, by node: of units ended, made and read."""
        found, masks = list(map(or_, self.takes, self.leaves)), self._atoms.masks
        for i, node in enumerate(self.nodes):
            for unit in node.reads:
                found[i] |= masks[self.roster.places[unit]]
        return found

    def add_state_edges(self) -> None:
        """A unit is made before it is read or changed further, and read before it ends."""
        for unit in self._passing:
            maker, ender = self.maker[unit], self.ender[unit]
            assert maker is not None
            assert ender is not None
            self.waits[ender][maker] = (EdgeKind.STATE, reasons.GOES_ON, unit)
        for i, node in enumerate(self.nodes):
            for unit in node.reads:
                self.add_reading(i, unit)

    def add_reading(self, reader: int, unit: int) -> None:
        """Put an Extend after the maker of a unit it reads, and before its end."""
        if (maker := self.maker[unit]) is not None:
            self.waits[reader][maker] = (EdgeKind.STATE, reasons.READS, unit)
        if (ender := self.ender[unit]) is not None:
            if self.nodes[ender].park:
                self.waits[reader][ender] = (EdgeKind.STATE, reasons.READS_PARKED, unit)
            else:
                self.waits[ender][reader] = (EdgeKind.STATE, reasons.READ_BEFORE_END, unit)

    def add_release_edges(self) -> None:
        """A device that one unit leaves and another takes is released before it is acquired.

        Between stages that holds for devices that one stage leaves and another comes to; stages
        that share a device, before or after, share it also meanwhile.
        """
        comes, leaves = [0] * len(self.stages), [0] * len(self.stages)
        acquirers: list[tuple[int, int]] = []
        releasers: dict[int, list[tuple[int, int]]] = {}
        for i, (takes, left) in enumerate(zip(self.takes, self.leaves, strict=True)):
            if takes == left:
                continue
            stage = self.nodes[i].stage
            if acquired := takes & ~left:
                comes[stage] |= acquired
                acquirers.append((i, acquired))
            if released := left & ~takes:
                leaves[stage] |= released
                for bit in bits(released):
                    releasers.setdefault(bit, []).append((i, stage))
        for i, acquired in acquirers:
            own, by_node = self.nodes[i].stage, dict[int, int]()
            for bit in bits(acquired):
                for first, stage in releasers.get(bit, ()):
                    if stage == own or not bit & (comes[stage] | leaves[own]):
                        by_node[first] = by_node.get(first, 0) | bit
            for first, shared in by_node.items():
                # One that goes on from this one releases what this one acquires.
                if not (self._passing and self._goes_on_from(first, i)):
                    self.waits[i].setdefault(first, (EdgeKind.RELEASE, reasons.RELEASED, shared))

    def _goes_on_from(self, later: int, earlier: int) -> bool:
        """Whether a node ends what another made, or what was made of that."""
        for unit in self.nodes[later].ended:
            maker = self.maker[unit]
            if maker is not None and (maker == earlier or self._goes_on_from(maker, earlier)):
                return True
        return False

    # --- As it is read --------------------------------------------------------------------------

    def primitive(self, number: int, op_id: OpId) -> Primitive:
        """Return a node as the primitive it stands for."""
        node, name, unit = self.nodes[number], self.roster.id, self.roster.unit
        if node.kind is Kind.EXTEND:
            return Extend(op_id, tuple(map(name, node.reads)), unit(node.made[0]))
        if node.kind is Kind.DESTROY:
            return Destroy(op_id, name(node.ended[0]), node.park)
        if node.kind is Kind.SPLIT:
            into = tuple(map(unit, node.made))
            return Split(op_id, name(node.ended[0]), into, node.staging_bytes)
        parents = tuple(map(name, node.ended))
        return Merge(op_id, parents, unit(node.made[0]), node.staging_bytes)

    def spelled(self, first: int, then: int) -> str:
        """Say why one node waits for another."""
        _, text, about = self.waits[then][first]
        if "{unit}" in text:
            return text.format(unit=self.roster.id(about))
        by, to = self.stages[self.nodes[first].stage], self.stages[self.nodes[then].stage]
        return text.format(devices=self._names(about), by=by, to=to)

    def _names(self, mask: int) -> str:
        """Spell devices, three at most."""
        if mask not in self._named:
            found = [d for bit in bits(mask) for d in self._by_atom[bit]]
            found.sort(key=self._turns.__getitem__)
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            self._named[mask] = ", ".join(map(str, found[:3])) + more
        return self._named[mask]

    @cached_property
    def _named(self) -> dict[int, str]:
        """Devices as spelled, by mask."""
        return {}

    @cached_property
    def _by_atom(self) -> dict[int, Group]:
        return self._atoms.devices()

    @cached_property
    def _turns(self) -> dict[Device, int]:
        """In which order devices are spelled: those that units hold together, together."""
        changed = (unit for node in self.nodes for unit in (*node.ended, *node.made))
        units = dict.fromkeys(chain(self._readable(), changed))
        groups = Atoms(self.roster.places[unit] for unit in units).devices().values()
        return {device: turn for turn, device in enumerate(chain.from_iterable(groups))}
