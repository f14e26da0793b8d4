"""Exact search: set partitions of stages into groups, sizes of groups, and ways to share a group.

For each partition, sizes are assigned group by group and dropped as soon as a lower bound on the
step exceeds the best step found (branch and bound, vectorized over assignments). What is left is
visited in order of its bound, with the groups' true shapes on the nodes and their Pareto fronts, in
every order of the groups in which these shapes differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nereus_core.cost.op_classes import FloatArray, IntArray
from nereus_core.planner.bounds import TIE, Blocks, Bounds, partitions
from nereus_core.planner.colocating import Front
from nereus_core.planner.groups import Shape, Spans, arrangements, shape_between
from nereus_core.planner.pareto import front
from nereus_core.planner.space import Space

_TIED_KEPT = 32
"""Equally fast solutions kept to choose the one nearest to the current plan."""
_OTHERS = 4
"""Other partitions solved at least once, to be shown as runners-up."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Groups of stages, where they lie, and an option row for every stage."""

    seconds: float
    """Of the stages and their synchronization, as the space counts them."""
    blocks: Blocks
    spans: Spans
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    best: tuple[Solution, ...]
    """Equally fast ones, in the order found; empty when nothing fits."""
    searched: int
    """Assignments of sizes that were solved exactly."""
    others: Callable[[], tuple[Solution, ...]]
    """Finds the best of other partitions, fastest first: to be shown as runners-up."""


def search(space: Space) -> Found:
    """Find the fastest solutions; exact on the space."""
    return _Search(space).run()


class _Search:
    """The state of one search: the best step so far and what reached it."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._bounds = Bounds(space, space.least_s())
        self._best_s = np.inf
        self._tied: list[Solution] = []
        self._by_partition: dict[Blocks, Solution] = {}
        self._searched = 0
        self._shapes: dict[tuple[int, int], Shape] = {}
        self._arrangements: dict[tuple[int, ...], tuple[Spans, ...]] = {}

    def run(self) -> Found:
        candidates = [
            blocks
            for blocks in partitions(
                len(self._space.stages), self._space.together, self._space.apart
            )
            if len(blocks) <= self._space.num_devices
        ]
        bounded = list(zip(self._bounds.of_partitions(candidates), candidates, strict=True))
        # All together first: its fronts are small, and its step prunes the other partitions.
        for bound, blocks in sorted(bounded, key=lambda b: (len(b[1]) > 1, b)):
            if bound <= self._best_s * (1 + TIE) and bound < np.inf:
                self._visit(blocks)
        best = tuple(s for s in self._tied if s.seconds <= self._best_s * (1 + TIE))
        likely = [blocks for bound, blocks in sorted(bounded) if bound < np.inf]
        return Found(best, self._searched, lambda: self._others(best, likely))

    def _others(self, best: Sequence[Solution], by_bound: Sequence[Blocks]) -> tuple[Solution, ...]:
        """Solve a likely assignment of partitions ruled out by bounds too: why did they lose?"""
        for blocks in by_bound[: 3 * _OTHERS]:
            if len(self._by_partition) > _OTHERS:
                break
            if blocks not in self._by_partition:
                self._solve(blocks, self._arranged(self._likely_sizes(blocks))[0], np.inf)
        taken = {s.blocks for s in best[:1]}
        others = [s for b, s in self._by_partition.items() if b not in taken]
        return tuple(sorted(others, key=lambda s: (s.seconds, s.blocks)))

    def _likely_sizes(self, blocks: Blocks) -> tuple[int, ...]:
        """Grow the group whose growth shortens the bound most until the devices are used up."""
        space, groups = self._space, np.arange(len(blocks))
        least = np.stack([self._bounds.block(block) for block in blocks])
        least = np.where(np.isfinite(least), least, 1e9)  # shrink the number of misfits
        at = np.zeros(len(blocks), dtype=np.int64)
        while True:
            grown = at + np.eye(len(blocks), dtype=np.int64)
            grown = grown[grown.max(axis=1) < len(space.sizes)]
            grown = grown[space.sizes[grown].sum(axis=1) <= space.num_devices]
            if not len(grown):
                return tuple(int(z) for z in space.sizes[at])
            level_s = least[groups, grown]  # [trial, group, level]
            group_s = level_s.sum(axis=2)
            seconds = space.objective(level_s.max(axis=1), group_s.max(axis=1))
            at = grown[np.lexsort((group_s.sum(axis=1), seconds))[0]]

    def _visit(self, blocks: Blocks) -> None:
        """Solve every assignment of sizes to a partition's groups that can still win or tie."""
        sizes, bounds = self._bounds.assignments(blocks, self._best_s * (1 + TIE))
        tied_visits = 0
        for i in np.argsort(bounds, kind="stable"):  # equal bounds: fewer devices first
            if bounds[i] > self._best_s * (1 + TIE):
                break
            if bounds[i] >= self._best_s * (1 - TIE):
                tied_visits += 1
                if tied_visits > _TIED_KEPT:
                    break
            own = tuple(int(z) for z in sizes[i])
            for spans in self._arranged(own):
                self._solve(blocks, spans, self._best_s * (1 + TIE))

    def _arranged(self, sizes: tuple[int, ...]) -> tuple[Spans, ...]:
        if sizes not in self._arrangements:
            self._arrangements[sizes] = arrangements(sizes, self._space.node_sizes)
        return self._arrangements[sizes]

    def _shape(self, start: int, end: int) -> Shape:
        if (start, end) not in self._shapes:
            self._shapes[start, end] = shape_between(self._space.node_sizes, start, end)
        return self._shapes[start, end]

    def _solve(self, blocks: Blocks, spans: Spans, limit_s: float) -> None:
        """Combine the fronts of groups that lie so; keep the result where it wins or ties."""
        self._searched += 1
        shapes = [self._shape(*span) for span in spans]
        fronts: list[Front] = []
        for block, shape in zip(blocks, shapes, strict=True):
            ways = self._space.front(block, shape, limit_s, whole=len(blocks) == 1)
            if not len(ways.level_s):
                return
            fronts.append(ways)
        level_s, group_s, picks = self._combined(fronts, limit_s)
        if not len(level_s):
            return
        seconds = self._space.objective(level_s, group_s)
        at = int(seconds.argmin())
        rows = tuple(
            tuple(int(r) for r in ways.rows[pick])
            for ways, pick in zip(fronts, picks[at], strict=True)
        )
        self._keep(Solution(float(seconds[at]), blocks, spans, rows))

    def _combined(
        self, fronts: Sequence[Front], limit_s: float
    ) -> tuple[FloatArray, FloatArray, IntArray]:
        """Undominated (seconds per level, longest group) over one way per group, and the ways."""
        space = self._space
        level_s, group_s = np.zeros((1, space.num_levels)), np.zeros(1)
        picks = np.zeros((1, 0), dtype=np.int64)
        for ways in fronts:
            a, b = (m.ravel() for m in np.indices((len(level_s), len(ways.level_s))))
            level_s = np.maximum(level_s[a], ways.level_s[b])
            group_s = np.maximum(group_s[a], ways.level_s[b].sum(axis=1))
            picks = np.concatenate([picks[a], b[:, None]], axis=1)
            may_win = space.objective(level_s, group_s) <= limit_s
            level_s, group_s, picks = level_s[may_win], group_s[may_win], picks[may_win]
            if len(level_s) > 1:
                kept = front(np.concatenate([level_s, group_s[:, None]], axis=1))
                level_s, group_s, picks = level_s[kept], group_s[kept], picks[kept]
        return level_s, group_s, picks

    def _keep(self, solution: Solution) -> None:
        known = self._by_partition.get(solution.blocks)
        if known is None or solution.seconds < known.seconds:
            self._by_partition[solution.blocks] = solution
        if solution.seconds < self._best_s * (1 - TIE):
            self._tied = [s for s in self._tied if s.seconds <= solution.seconds * (1 + TIE)]
        if solution.seconds <= self._best_s * (1 + TIE) and len(self._tied) < _TIED_KEPT:
            self._tied.append(solution)
        self._best_s = min(self._best_s, solution.seconds)
