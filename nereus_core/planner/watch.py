"""Watch: what is worked out once about a plan, so that 'still good?' takes no search and no tables.

The bound on the best step is the least of three: all stages on one group, with a price per byte for
the memory that they share; every assignment of devices to other partitions that was within reach of
the best; and what the assignments beyond reach took at least, grown by the least growth there is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.op_classes import FloatArray, IntArray
from nereus_core.cost.step import Cell, makespan, options_of, regions
from nereus_core.plan import Plan, plan_problems
from nereus_core.planner.bounds import Blocks, Bounds, partitions
from nereus_core.planner.colocating import best_price
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.groups import shape_between
from nereus_core.planner.pareto import front
from nereus_core.planner.slopes import REACH, Slopes, coordinates, moved, probes
from nereus_core.planner.space import Space
from nereus_core.workload import ModelStage

_SLACKS = (0.4, 0.2, 0.1, 0.05)
"""Above the bound of today's best: assignments kept, fewer where they are too many."""
_KEPT = 1000
"""Assignments kept at most; chosen for speed."""
_MISFIT_S = 1e12
"""Stands for no way to run: finite, so that it can be multiplied by zero."""


@dataclass(frozen=True, slots=True, eq=False)
class _Current:
    """The plan that runs: per stage one row per number of rounds."""

    stages: tuple[ModelStage, ...]
    starts: tuple[int, ...]
    """First row of each stage, then the number of all."""
    seconds: Slopes
    runs_bytes: Slopes
    room_bytes: FloatArray
    """[row]: what is left beside all that stays where the stage runs."""
    met: Collection[Cell]

    @classmethod
    def of(cls, cost: CostModel, trials: Sequence[Lengths], plan: Plan) -> Self:
        tables = [
            [cost.table(s, options_of(p), lengths) for lengths in trials] for s, p in plan.items()
        ]
        stays = {s: float(own[0].persistent_bytes[0]) for s, own in zip(plan, tables, strict=True)}
        met = regions(plan)
        room, starts = [], [0]
        for stage, own in zip(plan, tables, strict=True):
            beside = max(sum(stays[s] for s in cell) for cell in met if stage in cell)
            room.append(np.full(len(own[0].waves), cost.capacity_bytes - beside))
            starts.append(starts[-1] + len(own[0].waves))
        seconds = [np.array([t.seconds + t.sync_s for t in own]) for own in tables]
        runs = [np.array([t.transient_bytes for t in own]) for own in tables]
        return cls(
            tuple(plan),
            tuple(starts),
            Slopes.of(np.concatenate(seconds, axis=1)),
            Slopes.of(np.concatenate(runs, axis=1)),
            np.concatenate(room),
            met,
        )

    def step_s(self, cost: CostModel, by: FloatArray) -> float:
        """Upper bound of a step without what lies between stages; inf where it may not fit."""
        fits = self.runs_bytes.most(by) <= self.room_bytes
        seconds = self.seconds.most(by)
        busy_s: dict[ModelStage, float] = {}
        for stage, start, end in zip(self.stages, self.starts, self.starts[1:], strict=False):
            row = start + int(fits[start:end].argmax())
            if not fits[row]:
                return math.inf
            # The model takes the fewest rounds that fit: these or fewer.
            busy_s[stage] = float(seconds[start : row + 1].max())
        return makespan(cost.job.workload, busy_s, self.met)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """All stages on all devices: every way that ever fits, with prices for bytes that stay."""

    seconds: Slopes
    starts: IntArray
    """First way of each stage."""
    priced: FloatArray
    """[price, way]."""
    room: FloatArray
    """[price]: what the room for bytes that stay is worth."""

    @classmethod
    def of(cls, spaces: Sequence[Space]) -> Self | None:
        """None where some stage does not fit or the stages may not share."""
        base = spaces[0]
        capacity = base.cost.capacity_bytes
        shape = shape_between(base.node_sizes, 0, base.num_devices)
        slopes, stays, peaks = [], [], []
        for i, o in enumerate(base.options):
            fits, crossing = o.grid.fitted(shape)
            least = np.min([s.options[i].transient_bytes for s in spaces], axis=0)
            ever = (o.persistent_bytes[:, None] + least <= capacity) & fits[:, None]
            if not ever.any():
                return None
            rows = np.arange(len(ever))
            own = Slopes.of(np.array([s.options[i].busy_s[crossing, rows][ever] for s in spaces]))
            keeps = np.broadcast_to(o.persistent_bytes[:, None], ever.shape)[ever]
            kept = front(np.column_stack([own.least_at_corners(), keeps]))
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

    def least_s(self, by: FloatArray) -> float:
        """Lower bound of the sum of all stages."""
        priced = np.minimum.reduceat(self.seconds.least(by) + self.priced, self.starts, axis=1)
        return float((priced.sum(axis=1) - self.room).max())


@dataclass(frozen=True, slots=True, eq=False)
class _Others:
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
    def of(cls, spaces: Sequence[Space], best_s: float) -> Self:
        """Keep the assignments whose bound is near to the best step of today."""
        base = spaces[0]
        slopes, at = [], []
        for i, o in enumerate(base.options):
            least = np.min([s.options[i].transient_bytes for s in spaces], axis=0)
            ever = o.persistent_bytes[:, None] + least <= base.cost.capacity_bytes
            # Whatever is crossed: a link between nodes may be the faster one.
            ways = np.isfinite(o.busy_s) & ever
            own = Slopes.of(np.array([s.options[i].busy_s[ways] for s in spaces]))
            size = np.searchsorted(base.sizes, o.grid.num_devices)
            size = np.broadcast_to(size[:, None], ways.shape)[ways]
            kept = front(np.column_stack([size, own.least_at_corners()]))  # by size, then seconds
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
                for blocks in partitions(len(base.stages), together)
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
        most = len(base.stages)
        kept_blocks, kept_sizes = [np.zeros((0, most), np.int64)], [np.zeros((0, most), np.int64)]
        for blocks, sizes in found:
            pad = ((0, 0), (0, most - len(blocks)))
            own = np.tile([names.index(b) for b in blocks], (len(sizes), 1)) if len(sizes) else ()
            if len(sizes):
                kept_blocks.append(np.pad(own, pad, constant_values=len(names)))
                kept_sizes.append(np.pad(np.searchsorted(base.sizes, sizes), pad))
        return cls(
            base,
            joined,
            starts,
            flat[starts],
            members.reshape(-1, len(base.stages)),
            np.concatenate(kept_blocks),
            np.concatenate(kept_sizes),
            reach_s,
        )

    def least_s(self, by: FloatArray) -> float:
        """Lower bound over all of them."""
        seconds = self.seconds.least(by)
        grown = float((self.seconds.slope @ by + self.seconds.below).min(initial=0.0))
        bound_s = self.beyond_s * math.exp(grown)
        if not len(self.blocks):
            return bound_s
        least_s = np.minimum(_by_size(self.space, seconds, self.starts, self.at), _MISFIT_S)
        tables = (self.members @ least_s).reshape(-1, self.space.num_levels, least_s.shape[1])
        group_s = tables[self.blocks, :, self.sizes]  # [assignment, group, level]
        whole_s = group_s.sum(axis=2).max(axis=1)
        return min(bound_s, float(self.space.objective(group_s.max(axis=1), whole_s).min()))


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """Tells whether a plan is within delta of the best possible after lengths or rates moved."""

    cost: CostModel
    lengths: Lengths
    constraints: Constraints
    _current: _Current
    _whole: _Whole | None
    _others: _Others

    @classmethod
    def of(
        cls, cost: CostModel, lengths: Lengths, constraints: Constraints, plan: Plan
    ) -> Self | None:
        """Work out what the check needs: a dozen times the work of the tables.

        Returns None where the plan breaks a rule or a constraint, so that no check can pass.

        Raises:
            NoFeasiblePlan: constraints or devices leave some stage no layout.
        """
        trials = [moved(lengths, by) for by in probes()]
        spaces = [Space.of(cost, trial, constraints, plan) for trial in trials]
        # Least numbers of units as far as the devices allow: the space has lowered them.
        if plan_problems(plan, cost.job) or not spaces[0].constraints.allows(plan, plan):
            return None
        whole = _Whole.of(spaces)
        current = _Current.of(cost, trials, plan)
        best_s = min(
            current.step_s(cost, np.zeros(4)), whole.least_s(np.zeros(4)) if whole else math.inf
        )
        return cls(cost, lengths, constraints, current, whole, _Others.of(spaces, best_s))

    def still_good(
        self, cost: CostModel, lengths: Lengths, constraints: Constraints, delta: float
    ) -> bool:
        """Whether the plan fits and is within ``delta`` of the best possible.

        False may also mean that one has to look anew: the cluster or the constraints changed,
        lengths moved too far, or the bounds are too weak to tell.
        """
        if cost is not self.cost and not self._comparable(cost):
            return False
        if constraints is not self.constraints and constraints != self.constraints:
            return False
        by = coordinates(lengths) - coordinates(self.lengths)
        if max(map(abs, by.tolist())) > REACH or not _same_shape(lengths, self.lengths):
            return False
        slower, faster = (1.0, 1.0) if cost is self.cost else self._rates(cost)
        between_s = cost.between.seconds
        current_s = self._current.step_s(cost, by) * slower + between_s
        allowed_s = (1 + delta) * between_s
        per_s = (1 + delta) * faster
        if self._whole is not None and current_s > per_s * self._whole.least_s(by) + allowed_s:
            return False
        return current_s <= per_s * self._others.least_s(by) + allowed_s

    def _comparable(self, cost: CostModel) -> bool:
        return cost.headroom == self.cost.headroom and cost.job == self.cost.job

    def _rates(self, cost: CostModel) -> tuple[float, float]:
        """Factors that no stage has become slower or faster by since."""
        before, after = self.cost.efficiencies, cost.efficiencies
        classes = after.inverse / before.inverse
        stages = [after.residual(s) / before.residual(s) for s in self._current.stages]
        stages.append(cost.between.sync_factor / self.cost.between.sync_factor)
        return float(classes.max()) * max(stages), float(classes.min()) * min(stages)


def _same_shape(one: Lengths, other: Lengths) -> bool:
    """Whether lengths differ in nothing but their coordinates."""
    four = (one.prompt_mean, one.response_mean, one.response_p95, one.response_max)
    return one == replace(
        other,
        prompt_mean=four[0],
        response_mean=four[1],
        response_p95=four[2],
        response_max=four[3],
    )


def _by_size(space: Space, seconds: FloatArray, starts: IntArray, at: IntArray) -> FloatArray:
    """Fewest seconds of each stage in a group of each size [stage, size]; inf where none fits."""
    least_s = np.full(len(space.stages) * len(space.sizes), np.inf)
    least_s[at] = np.minimum.reduceat(seconds, starts)
    return np.minimum.accumulate(least_s.reshape(len(space.stages), -1), axis=1)
