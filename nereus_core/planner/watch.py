"""Watch: what is worked out once about a plan, so that 'still good?' takes no search and no tables.

The plan's own step is bounded from above and every rival's (`rivals`) from below, by slopes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.op_classes import FloatArray
from nereus_core.cost.step import Cell, makespan, options_of, regions
from nereus_core.plan import Plan, plan_problems
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.rivals import Others, Whole
from nereus_core.planner.slopes import REACH, Slopes, coordinates, moved, probes
from nereus_core.planner.space import Space
from nereus_core.workload import ModelStage


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
class Watch:
    """Tells whether a plan is within delta of the best possible after lengths or rates moved."""

    cost: CostModel
    lengths: Lengths
    constraints: Constraints
    _current: _Current
    _whole: Whole | None
    _others: Others

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
        whole = Whole.of(spaces)
        current = _Current.of(cost, trials, plan)
        best_s = min(
            current.step_s(cost, np.zeros(4)), whole.least_s(np.zeros(4)) if whole else math.inf
        )
        return cls(cost, lengths, constraints, current, whole, Others.of(spaces, best_s))

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
        same = cost.headroom == self.cost.headroom and cost.peaks.factors == self.cost.peaks.factors
        return same and cost.job == self.cost.job

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
