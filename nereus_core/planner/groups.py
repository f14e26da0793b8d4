"""Groups of devices: how they are cut from nodes, and how a stage is packed onto one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from operator import attrgetter

import numpy as np

from nereus_core.cluster import Device
from nereus_core.cost.op_classes import BoolArray, IntArray
from nereus_core.layout import Layout
from nereus_core.plan import Placement

_ALL_SIZES_UP_TO = 16
"""Devices up to which groups may have any size."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What a layout sees of a group: how many devices it has on each node, most first."""

    pieces: tuple[tuple[int, int], ...]
    """(devices, number of nodes with so many)."""

    @classmethod
    def of(cls, counts: Sequence[int]) -> Shape:
        """Sort and count pieces."""
        return cls(tuple((n, counts.count(n)) for n in sorted(set(counts), reverse=True)))

    @property
    def num_devices(self) -> int:
        """Devices of the group."""
        return sum(n * times for n, times in self.pieces)

    def fitted(
        self, tp: IntArray, pp: IntArray, dp: IntArray
    ) -> tuple[BoolArray, BoolArray, BoolArray]:
        """Per option: whether it fits, whether pp and whether dp cross nodes, as `packed` packs."""
        per_node = np.stack([n // tp for n, _ in self.pieces])  # tp groups on a node of each kind
        whole = np.array([[times] for _, times in self.pieces])
        fits = (per_node * whole).sum(axis=0) >= dp * pp
        dp_crosses = (dp > 1) & (dp * pp > per_node[0])
        pp_crosses = np.zeros(len(tp), dtype=np.bool_)
        start = np.zeros(len(tp), dtype=np.int64)
        used = dp * pp
        for groups, (_, times) in zip(per_node, self.pieces, strict=True):
            # Node boundaries after each node of this kind: start + k * groups, k = 1 .. times. A
            # boundary inside the used range that is no multiple of pp lies inside a unit. The first
            # boundary that is none is at k = 1 or 2: if both are multiples, groups is one.
            for k in range(1, min(times, 2) + 1):
                boundary = start + k * groups
                pp_crosses |= (groups > 0) & (boundary < used) & (boundary % pp != 0)
            start = start + groups * times
        return fits, pp_crosses, dp_crosses


def by_node(devices: Sequence[Device]) -> list[list[Device]]:
    """Group devices by node, nodes with most devices first, otherwise in the order given."""
    nodes: dict[str, list[Device]] = {}
    for node, run in groupby(devices, key=attrgetter("node")):
        nodes.setdefault(node, []).extend(run)
    return sorted(nodes.values(), key=len, reverse=True)


def shape_of(devices: Sequence[Device]) -> Shape:
    """Return the shape of a group."""
    return Shape.of([len(node) for node in by_node(devices)])


def packed(layout: Layout, dp: int, devices: Sequence[Device]) -> Placement | None:
    """Pack units onto a group from its start, tensor-parallel ranks inside a node, or None."""
    ranks: list[Device] = []
    for node in by_node(devices):
        ranks += node[: len(node) - len(node) % layout.tp]
    n = layout.num_devices
    if len(ranks) < dp * n:
        return None
    return Placement(layout, tuple([tuple(ranks[i : i + n]) for i in range(0, dp * n, n)]))


def group_sizes(num_devices: int) -> IntArray:
    """Sizes of groups to consider: all up to 16 devices; beyond, 2^k, 3 * 2^k and all devices."""
    if num_devices <= _ALL_SIZES_UP_TO:
        return np.arange(1, num_devices + 1)
    powers = [1 << k for k in range(num_devices.bit_length())]
    sizes = {n for p in powers for n in (p, 3 * p) if n <= num_devices}
    return np.array(sorted(sizes | {num_devices}))


Spans = tuple[tuple[int, int], ...]
"""Where groups lie in the order of devices: (start, end) of each."""


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Return the order of groups by size; those of one size as they come."""
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])


def cut(sizes: Sequence[int], order: Iterable[int]) -> Spans:
    """Place groups one after another in an order; returns where, in input order."""
    at, start = {}, 0
    for i in order:
        at[i] = (start, start + sizes[i])
        start += sizes[i]
    return tuple(at[i] for i in range(len(sizes)))


def arrangements(sizes: Sequence[int], node_sizes: Sequence[int]) -> tuple[Spans, ...]:
    """Cut groups off in every order that gives some group another shape; largest first to begin."""
    found: dict[tuple[Shape, ...], Spans] = {}
    for order in permutations(largest_first(sizes)):
        spans = cut(sizes, order)
        found.setdefault(tuple(shape_between(node_sizes, *span) for span in spans), spans)
    return tuple(found.values())


def shape_between(node_sizes: Sequence[int], start: int, end: int) -> Shape:
    """Shape of the devices from ``start`` to ``end`` in order of nodes."""
    counts, at = [], 0
    for size in node_sizes:
        piece = min(end, at + size) - max(start, at)
        if piece > 0:
            counts.append(piece)
        at += size
    return Shape.of(counts)
