"""Rivals: lower bounds of the best step as lengths move, from slopes of all choices.

Two families: all stages on one group, with a price per byte for the memory that they share; and
assignments of devices to other partitions, those within reach of today's best one by one, the
others by what they took at least, grown by the least growth there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from nereus_core.cost import CostModel
from nereus_core.cost.op_classes import FloatArray, IntArray
from nereus_core.plan import Plan
from nereus_core.planner.bounds import Blocks, Bounds, partitions
from nereus_core.planner.colocating import best_price
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.groups import shape_between
from nereus_core.planner.slopes import Box, Slopes
from nereus_core.planner.space import Space

PEAKS_REACH = 1.2
"""Factor by which what running takes may turn out less than thought; chosen: four steps of the grid
on which `Peaks` learns."""
_SLACKS = (0.4, 0.2, 0.1, 0.05)
"""Above the bound of today's best: assignments kept, fewer where they are too many."""
_KEPT = 1000
"""Assignments kept at most; chosen for speed."""
_MISFIT_S = 1e12
"""Stands for no way to run: finite, so that it can be multiplied by zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The space at every probe of a box of lengths."""

    sizes: tuple[Space, ...]
    """At `Box.sizes_probed`; the first is that of today's lengths."""
    up: tuple[Space, ...]
    """With each gap of the shape wider."""
    down: tuple[Space, ...]
    """With each gap narrower."""
    way_down: FloatArray
    """`Box.down`."""

    @classmethod
    def of(cls, cost: CostModel, box: Box, constraints: Constraints, plan: Plan) -> Self:
        """Price all choices at every probe; raises NoFeasiblePlan where a stage has none."""
        sizes = tuple(Space.of(cost, way, constraints, plan) for way in box.sizes_probed())
        pairs = box.shapes_probed()
        return cls(
            sizes,
            tuple(sizes[0].reshaped(wider) for wider, _ in pairs),
            tuple(sizes[0].reshaped(narrower) for _, narrower in pairs),
            box.down,
        )

    @property
    def today(self) -> Space:
        """The space of today's lengths."""
        return self.sizes[0]

    def least_bytes(self, stage: int) -> FloatArray:
        """The least that a stage's options ever take while they run [option, wave]."""
        found = [s.options[stage].transient_bytes for s in (*self.sizes, *self.up, *self.down)]
        return np.asarray(np.min(found, axis=0) / PEAKS_REACH)

    def slopes(self, stage: int, at: tuple[IntArray, ...]) -> Slopes:
        """Bounds of the seconds of some ways [crossing, option, wave] of a stage."""
        sizes, up, down = (
            np.array([s.options[stage].busy_s[at] for s in spaces]).reshape(-1, len(at[0]))
            for spaces in (self.sizes, self.up, self.down)
        )
        return Slopes.of(sizes, up, down, self.way_down)


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """All stages on all devices: every way that ever fits, with prices for bytes that stay."""

    seconds: Slopes
    starts: IntArray
    """First way of each stage."""
    priced: FloatArray
    """[price, way]."""
    room: FloatArray
    """[price]: what the room for bytes that stay is worth."""

    @classmethod
    def of(cls, probed: Probed) -> Self | None:
        """None where some stage does not fit or the stages may not share."""
        base = probed.today
        if not base.shareable:
            return None
        capacity = base.cost.capacity_bytes
        shape = shape_between(base.node_sizes, 0, base.num_devices)
        slopes, stays, peaks = [], [], []
        for i, o in enumerate(base.options):
            fits, crossing = o.fitted(shape)
            least = probed.least_bytes(i)
            ever = (o.persistent_bytes[:, None] + least <= capacity) & fits[:, None]
            if not ever.any():
                return None
            row, wave = np.nonzero(ever)
            own = probed.slopes(i, (crossing[row], row, wave))
            keeps = o.persistent_bytes[row]
            kept = own.undominated(keeps[:, None])
            slopes.append(own.take(kept))
            stays.append(keeps[kept])
            peaks.append(least[ever].min())
        alone = base.alone_together()
        fit = all(len(own.rows) for own in alone)  # what fits nowhere today has no price
        price = best_price(alone, capacity)[0] if fit else 0.0
        prices = price * np.array([0.0, 0.5, 1.0, 2.0])
        starts = np.cumsum([0, *(len(s) for s in stays[:-1])])
        return cls(
            Slopes.joined(slopes),
            starts,
            prices[:, None] * np.concatenate(stays),
            prices * (capacity - max(peaks)),
        )

    def least_s(self, logs: FloatArray) -> float:
        """Lower bound of the sum of all stages, from those of ``seconds``."""
        seconds = np.exp(logs)
        priced = np.minimum.reduceat(seconds + self.priced, self.starts, axis=1)
        return float((priced.sum(axis=1) - self.room).max())


@dataclass(frozen=True, slots=True, eq=False)
class Others:
    """Assignments of devices to partitions with two groups or more."""

    space: Space
    seconds: Slopes
    """Every way of every stage that ever fits, alone, by stage and number of devices."""
    starts: IntArray
    at: IntArray
    """Flat [stage, size] of the runs of ways that start there."""
    members: FloatArray
    """Of blocks, per level, 1 where a stage is in: [block x level, stage]; the last is empty."""
    blocks: IntArray
    """[assignment, group]."""
    sizes: IntArray
    """Indices of sizes [assignment, group]."""
    beyond_s: float
    """Assignments that were not kept took no less."""

    @classmethod
    def of(cls, probed: Probed, best_s: float) -> Self:
        """Keep the assignments whose bound is near to the best step of today."""
        base = probed.today
        slopes, at = [], []
        for i, o in enumerate(base.options):
            least = probed.least_bytes(i)
            ever = o.persistent_bytes[:, None] + least <= base.cost.capacity_bytes
            # Whatever is crossed: a link between nodes may be the faster one.
            ways = np.isfinite(o.busy_s) & ever
            own = probed.slopes(i, np.nonzero(ways))
            size = np.searchsorted(base.sizes, o.grid.num_devices)
            size = np.broadcast_to(size[:, None], ways.shape)[ways]
            kept = own.undominated(size[:, None].astype(np.float64))
            kept = kept[np.argsort(size[kept], kind="stable")]
            slopes.append(own.take(kept))
            at.append(i * len(base.sizes) + size[kept])
        joined, flat = Slopes.joined(slopes), np.concatenate(at)
        starts = np.flatnonzero(np.diff(flat, prepend=-1))
        least_s = _by_size(base, np.exp(joined.middle), starts, flat[starts])
        bounds, together = Bounds(base, least_s), tuple(base.together)
        found: list[tuple[Blocks, IntArray]] = []
        reach_s = best_s
        for slack in _SLACKS:
            reach_s = best_s * (1 + slack)
            found = [
                (blocks, bounds.assignments(blocks, reach_s)[0])
                for blocks in partitions(len(base.stages), together, base.apart)
                if 1 < len(blocks) <= base.num_devices
            ]
            if sum(len(sizes) for _, sizes in found) <= _KEPT:
                break
        else:
            found, reach_s = [], 0.0  # too many near the best: nothing can be told
        names = sorted({block for blocks, sizes in found if len(sizes) for block in blocks})
        members = np.zeros((len(names) + 1, base.num_levels, len(base.stages)))
        for n, block in enumerate(names):
            for stage in block:
                members[n, base.options[stage].level, stage] = 1.0
        # One row per assignment: its groups, then groups of no stage.
        rows = [(blocks, row) for blocks, sizes in found for row in sizes]
        kept = np.zeros((2, len(rows), len(base.stages)), dtype=np.int64)
        kept[0] = len(names)
        for n, (blocks, row) in enumerate(rows):
            kept[0, n, : len(blocks)] = [names.index(b) for b in blocks]
            kept[1, n, : len(blocks)] = np.searchsorted(base.sizes, row)
        return cls(
            base,
            joined,
            starts,
            flat[starts],
            members.reshape(-1, len(base.stages)),
            kept[0],
            kept[1],
            reach_s,
        )

    def least_s(self, logs: FloatArray) -> float:
        """Lower bound over all of them, from those of ``seconds``."""
        grown, seconds = float((logs - self.seconds.middle).min(initial=0.0)), np.exp(logs)
        bound_s = self.beyond_s * math.exp(grown)
        if not len(self.blocks):
            return bound_s
        least_s = np.minimum(_by_size(self.space, seconds, self.starts, self.at), _MISFIT_S)
        tables = (self.members @ least_s).reshape(-1, self.space.num_levels, least_s.shape[1])
        group_s = tables[self.blocks, :, self.sizes]  # [assignment, group, level]
        level_s = group_s.max(axis=1)
        # Only where generation goes on beside the others does any one group matter by itself.
        alone = self.space.cost.job.workload.asynchronous
        whole_s = group_s.sum(axis=2).max(axis=1) if alone else level_s
        return min(bound_s, float(self.space.objective(level_s, whole_s).min()))


def _by_size(space: Space, seconds: FloatArray, starts: IntArray, at: IntArray) -> FloatArray:
    """Fewest seconds of each stage in a group of each size [stage, size]; inf where none fits."""
    least_s = np.full(len(space.stages) * len(space.sizes), np.inf)
    least_s[at] = np.minimum.reduceat(seconds, starts)
    return np.minimum.accumulate(least_s.reshape(len(space.stages), -1), axis=1)
