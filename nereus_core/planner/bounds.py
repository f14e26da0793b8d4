"""Lower bounds of a step: per partition of the stages, and per assignment of devices to its groups.

All follow from the fewest seconds of each stage alone in a group of each size; nothing here knows
that colocated stages share memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from nereus_core.cost.op_classes import FloatArray, IntArray
from nereus_core.planner.space import Space

TIE = 1e-9
"""Relative difference of predicted seconds below which two plans are equally fast."""

Block = tuple[int, ...]
"""Indices of the stages of one group."""
Blocks = tuple[Block, ...]
"""A partition of all stages."""


@lru_cache(maxsize=64)
def partitions(
    num_stages: int,
    together: tuple[frozenset[int], ...],
    apart: tuple[frozenset[int], ...] = (),
) -> tuple[Blocks, ...]:
    """All set partitions that keep together, and apart, the stages that must be; in fixed order."""

    def extend(blocks: Blocks, stage: int) -> Iterator[Blocks]:
        if stage == num_stages:
            yield blocks
            return
        for i, block in enumerate(blocks):
            yield from extend((*blocks[:i], (*block, stage), *blocks[i + 1 :]), stage + 1)
        yield from extend((*blocks, (stage,)), stage + 1)

    return tuple(
        blocks
        for blocks in extend((), 0)
        if all(any(group <= set(block) for block in blocks) for group in together)
        and all(len(group.intersection(block)) <= 1 for block in blocks for group in apart)
    )


class Bounds:
    """Bounds of one space from the fewest seconds of its stages [stage, size]."""

    def __init__(self, space: Space, least_s: FloatArray) -> None:
        self._space, self._least = space, least_s
        self._blocks: dict[Block, FloatArray] = {}

    def block(self, block: Block) -> FloatArray:
        """Lower bound of a block's seconds per level in a group of each size [size, level]."""
        if block not in self._blocks:
            found = np.zeros((len(self._space.sizes), self._space.num_levels))
            for stage in block:
                found[:, self._space.options[stage].level] += self._least[stage]
            self._blocks[block] = found
        return self._blocks[block]

    def of_partitions(self, candidates: Sequence[Blocks]) -> list[float]:
        """Lower bounds of partitions: every group as large as the others leave room for."""
        if not candidates:
            return []
        names = sorted({block for blocks in candidates for block in blocks})
        number = {block: i for i, block in enumerate(names)}
        # The last row stands for the groups that a partition has not.
        nothing = np.zeros((1, len(self._space.sizes), self._space.num_levels))
        tables = np.concatenate([np.stack([self.block(b) for b in names]), nothing])
        most = max(map(len, candidates))
        groups = np.array(
            [[number[b] for b in c] + [len(names)] * (most - len(c)) for c in candidates]
        )
        room = self._space.num_devices + 1 - np.array([len(c) for c in candidates])
        at = np.searchsorted(self._space.sizes, room, side="right") - 1
        least = tables[groups, at[:, None]]  # [partition, group, level]
        seconds = self._space.objective(least.max(axis=1), least.sum(axis=2).max(axis=1))
        return [float(s) for s in seconds]

    def assignments(self, blocks: Blocks, limit_s: float) -> tuple[IntArray, FloatArray]:
        """Sizes per group [assignment, group] with their lower bounds, within a limit."""
        space = self._space
        least = [self.block(block) for block in blocks]
        # What the groups still to come take at the very least, per level and as one group.
        rest_level = [np.zeros(space.num_levels)]
        rest_group = [0.0]
        for table in reversed(least[1:]):
            rest_level.append(np.maximum(rest_level[-1], table.min(axis=0)))
            rest_group.append(max(rest_group[-1], float(table.sum(axis=1).min())))
        chosen = np.zeros((1, 0), dtype=np.int64)
        used, level_s, group_s = (
            np.zeros(1, dtype=np.int64),
            np.zeros((1, space.num_levels)),
            np.zeros(1),
        )
        bounds = np.zeros(1)
        for i, table in enumerate(least):
            left = len(blocks) - 1 - i
            a, z = (m.ravel() for m in np.indices((len(used), len(space.sizes))))
            fits = used[a] + space.sizes[z] + left <= space.num_devices
            a, z = a[fits], z[fits]
            used = used[a] + space.sizes[z]
            level_s = np.maximum(level_s[a], table[z])
            group_s = np.maximum(group_s[a], table[z].sum(axis=1))
            bounds = space.objective(
                np.maximum(level_s, rest_level[left]), np.maximum(group_s, rest_group[left])
            )
            keep = (bounds <= limit_s) & np.isfinite(bounds)
            chosen = np.concatenate([chosen[a], space.sizes[z][:, None]], axis=1)[keep]
            used, level_s, group_s = used[keep], level_s[keep], group_s[keep]
            bounds = bounds[keep]
        return chosen, bounds
