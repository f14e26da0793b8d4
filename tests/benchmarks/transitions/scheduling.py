"""The problem that a transition graph answers, for solvers: when does each primitive run.

Primitives, their seconds (from the cost model) and what they read are those of the compiled graph;
free is when each runs. Two that touch a device never overlap; what a primitive needs made, read or
released comes before it: state and release edges. Order edges are the compiler's own choice, and
left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from nereus_core.cost import CostModel
from nereus_core.primitives import Destroy, Extend, created, sources, touched
from nereus_core.transition import EdgeKind, TransitionGraph


@dataclass(frozen=True)
class Problem:
    """Primitives by number."""

    seconds: tuple[float, ...]
    before: tuple[tuple[int, int], ...]
    """Pairs: the first has finished when the second starts."""
    apart: tuple[tuple[int, ...], ...]
    """Sets of which no two overlap: those that touch a device, each set once."""
    found_s: float
    """Completion time of the compiled graph."""

    @classmethod
    def of(cls, graph: TransitionGraph, cost: CostModel) -> Problem:
        """Read it off a graph."""
        number = {op.op_id: i for i, op in enumerate(graph.ops)}
        released = {
            (number[e.before], number[e.after]) for e in graph.edges if e.kind is not EdgeKind.ORDER
        }
        prices = graph.prices(cost)
        by_device: dict[object, list[int]] = defaultdict(list)
        for op in graph.ops:
            for device in touched(op, graph.atlas):
                by_device[device].append(number[op.op_id])
        return cls(
            tuple(prices[op.op_id].mean_s for op in graph.ops),
            tuple(sorted(_state(graph) | released)),
            tuple(sorted({tuple(ops) for ops in by_device.values() if len(ops) > 1})),
            graph.predicted(cost).mean_s,
        )

    @property
    def bound_s(self) -> float:
        """What no schedule can beat: the longest path, and the busiest device."""
        finish = [0.0] * len(self.seconds)
        waits: dict[int, list[int]] = defaultdict(list)
        for first, then in self.before:
            waits[then].append(first)
        for i, own_s in enumerate(self.seconds):  # numbered in an order that keeps every edge
            finish[i] = own_s + max((finish[j] for j in waits[i]), default=0.0)
        busiest = (sum(self.seconds[i] for i in ops) for ops in self.apart)
        return max([*finish, *busiest], default=0.0)


def _state(graph: TransitionGraph) -> set[tuple[int, int]]:
    """Pairs that state puts in order: the graph leaves out those that others imply."""
    maker = {u.id: i for i, op in enumerate(graph.ops) for u in created(op)}
    ender = {op.unit: (i, op.park) for i, op in enumerate(graph.ops) if isinstance(op, Destroy)}
    pairs: set[tuple[int, int]] = set()
    for i, op in enumerate(graph.ops):
        pairs |= {(maker[u], i) for u in sources(op) if u in maker}
        if isinstance(op, Extend):
            ends = (ender[u] for u in op.sources if u in ender)
            pairs |= {(j, i) if park else (i, j) for j, park in ends}
    return pairs
