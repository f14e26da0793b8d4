"""Watch: what is worked out once about a plan, so that 'still good?' takes no search and no tables.

The plan's own step is bounded from above and every rival's (`rivals`) from below, by slopes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from nereus_core.cost import CostModel, Lengths, StageTable
from nereus_core.cost.op_classes import FloatArray
from nereus_core.cost.step import Cell, levels, options_of, regions
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.rivals import PEAKS_REACH, Others, Probed, Whole
from nereus_core.planner.slopes import Box, Slopes
from nereus_core.workload import ModelStage, Stage, Workload


@dataclass(frozen=True, slots=True, eq=False)
class _Current:
    """The plan that runs: per stage one row per number of rounds."""

    stages: tuple[ModelStage, ...]
    rows: tuple[int, ...]
    """Rows of each stage."""
    seconds: Slopes
    runs_bytes: Slopes
    room_bytes: FloatArray
    """[row]: what is left beside all that stays where the stage runs."""
    turns: tuple[tuple[tuple[int, ...], ...], ...]
    """Sums of stages, by number, of which the longest counts, in turns that follow one another."""
    beside: tuple[tuple[int, ...], ...]
    """The same of all stages where generation goes on beside them; empty where it does not."""

    @classmethod
    def of(cls, cost: CostModel, box: Box, plan: Plan) -> Self:
        """Price the plan's own ways at every probe."""
        tables = [_Probes.of(cost, box, s, p) for s, p in plan.items()]
        today = [own.sizes[0] for own in tables]
        stays = {s: float(own.persistent_bytes[0]) for s, own in zip(plan, today, strict=True)}
        met = regions(plan)
        room = []
        for stage, own in zip(plan, today, strict=True):
            beside = max(sum(stays[s] for s in cell) for cell in met if stage in cell)
            room.append(np.full(len(own.waves), cost.capacity_bytes - beside))
        return cls(
            tuple(plan),
            tuple(len(own.waves) for own in today),
            Slopes.joined([own.slopes(box, _busy_s) for own in tables]),
            Slopes.joined([own.slopes(box, _runs_bytes) for own in tables]),
            np.concatenate(room),
            *_turns(cost.job.workload, tuple(plan), met),
        )

    def step_s(self, at: FloatArray, more: Sequence[float]) -> float:
        """Upper bound of a step without what lies between stages; inf where it may not fit.

        Args:
            at: place of the lengths.
            more: factor on what running takes, by stage.
        """
        busy_s, seconds = list[float](), self.seconds.most(at).tolist()
        fits = (self.runs_bytes.most(at) <= self.room_bytes / np.repeat(more, self.rows)).tolist()
        end = 0
        for number in self.rows:
            row, start, end = end, end, end + number
            while row < end and not fits[row]:
                row += 1
            if row == end:
                return math.inf
            # The model takes the fewest rounds that fit: these or fewer.
            busy_s.append(max(seconds[start : row + 1]))

        def longest(cells: tuple[tuple[int, ...], ...]) -> float:
            return max((sum(busy_s[i] for i in cell) for cell in cells), default=0.0)

        return max(sum(map(longest, self.turns)), longest(self.beside))


def _turns(
    workload: Workload, stages: tuple[ModelStage, ...], met: Collection[Cell]
) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], tuple[tuple[int, ...], ...]]:
    """What `cost.step.makespan` adds up, worked out once."""
    level = levels(workload)
    after = [s for s in stages if not (workload.asynchronous and s.stage is Stage.GENERATE)]
    turns = tuple(
        tuple(
            tuple(i for i, s in enumerate(stages) if s in cell and s in after and level[s] == n)
            for cell in met
        )
        for n in sorted({level[s] for s in after})
    )
    cells = tuple(tuple(i for i, s in enumerate(stages) if s in cell) for cell in met)
    return turns, cells if workload.asynchronous else ()


@dataclass(frozen=True, slots=True, eq=False)
class _Probes:
    """Tables of one placement at every probe."""

    sizes: Sequence[StageTable]
    up: Sequence[StageTable]
    down: Sequence[StageTable]

    @classmethod
    def of(cls, cost: CostModel, box: Box, stage: ModelStage, placement: Placement) -> Self:
        options = options_of(placement)

        def table(lengths: Lengths) -> StageTable:
            return cost.table(stage, options, lengths)

        sizes, pairs = [table(lengths) for lengths in box.sizes_probed()], box.shapes_probed()
        if stage.stage is not Stage.GENERATE:  # nothing else depends on the shape
            return cls(sizes, [sizes[0]] * len(pairs), [sizes[0]] * len(pairs))
        return cls(sizes, [table(up) for up, _ in pairs], [table(down) for _, down in pairs])

    def slopes(self, box: Box, read: Callable[[StageTable], FloatArray]) -> Slopes:
        """Bounds of what is read from a table, by row."""
        rows = len(self.sizes[0].waves)
        sizes, up, down = (
            np.array([read(t) for t in tables]).reshape(-1, rows)
            for tables in (self.sizes, self.up, self.down)
        )
        return Slopes.of(sizes, up, down, box.down)


def _busy_s(table: StageTable) -> FloatArray:
    return table.seconds + table.sync_s


def _runs_bytes(table: StageTable) -> FloatArray:
    return table.transient_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """Tells whether a plan is within delta of the best possible after lengths or rates moved."""

    cost: CostModel
    box: Box
    constraints: Constraints
    plan: Plan
    _current: _Current
    _whole: Whole | None
    _others: Others
    _rivals: Slopes
    """Seconds of `_whole`, where there is one, then of `_others`: bounded at once."""

    @property
    def middle(self) -> Bounded:
        """What it could say when it was made."""
        at = np.zeros(len(self.box.sizes) + len(self.box.gaps))
        return self._bounded(self.cost, at, [1.0] * len(self.plan))

    @classmethod
    def of(
        cls, cost: CostModel, lengths: Lengths, constraints: Constraints, plan: Plan
    ) -> Self | None:
        """Work out what the check needs: some dozens of times the work of the tables.

        Returns None where the plan breaks a rule or a constraint, so that no check can pass.

        Raises:
            NoFeasiblePlan: constraints or devices leave some stage no layout.
        """
        box = Box.around(lengths)
        probed = Probed.of(cost, box, constraints, plan)
        # Least numbers of units as far as the devices allow: the space has lowered them.
        if plan_problems(plan, cost.job) or not probed.today.constraints.allows(plan, plan):
            return None
        whole, current = Whole.of(probed), _Current.of(cost, box, plan)
        today = np.zeros(len(box.sizes) + len(box.gaps))
        best_s = min(
            current.step_s(today, [1.0] * len(plan)),
            whole.least_s(whole.seconds.least_logs(today)) if whole else math.inf,
        )
        others = Others.of(probed, best_s)
        rivals = Slopes.joined([*([whole.seconds] if whole else []), others.seconds])
        return cls(cost, box, constraints, plan, current, whole, others, rivals)

    def bounds(
        self, cost: CostModel, lengths: Lengths, constraints: Constraints, plan: Plan
    ) -> Bounded | None:
        """Bound a step of the plan from above and that of any plan from below.

        None where one has to look anew: the plan, the cluster or the constraints are others,
        or lengths, efficiencies or peaks moved too far.
        """
        if cost is not self.cost and not self._comparable(cost):
            return None
        if (plan is not self.plan and plan != self.plan) or constraints != self.constraints:
            return None
        more = [cost.peaks.factor(s) / self.cost.peaks.factor(s) for s in self._current.stages]
        at = self.box.place(lengths)
        if at is None or min(more) * PEAKS_REACH < 1:
            return None
        return self._bounded(cost, at, more)

    def _bounded(self, cost: CostModel, at: FloatArray, more: Sequence[float]) -> Bounded:
        slower, faster = (1.0, 1.0) if cost is self.cost else self._rates(cost)
        between_s = cost.between.seconds
        current_s = self._current.step_s(at, more) * slower
        logs, first = self._rivals.least_logs(at), 0
        if self._whole is not None:
            first = len(self._whole.seconds.middle)
        least_s = self._others.least_s(logs[first:])
        if self._whole is not None:
            least_s = min(least_s, self._whole.least_s(logs[:first]))
        return Bounded(current_s + between_s, least_s * faster + between_s)

    def still_good(
        self, cost: CostModel, lengths: Lengths, constraints: Constraints, delta: float
    ) -> bool:
        """Whether the plan fits and is within ``delta`` of the best possible.

        False may also mean that one has to look anew, or that the bounds are too weak to tell.
        """
        found = self.bounds(cost, lengths, constraints, self.plan)
        return found is not None and found.within(delta)

    def _comparable(self, cost: CostModel) -> bool:
        return cost.headroom == self.cost.headroom and cost.job == self.cost.job

    def _rates(self, cost: CostModel) -> tuple[float, float]:
        """Factors that no stage has become slower or faster by since."""
        before, after = self.cost.efficiencies, cost.efficiencies
        classes = after.log_inverse - before.log_inverse
        moved = {
            key: log - before.log_residual.get(key, 0.0) for key, log in after.log_residual.items()
        }
        stages = [moved.get(s, 0.0) for s in self._current.stages]
        own = [moved.get((s, p.layout), 0.0) for s, p in self.plan.items()]
        layouts = [log for key, log in moved.items() if isinstance(key, tuple)]
        # Syncs have a factor instead; one that is nothing, now or then, has no ratio.
        was, now = self.cost.between.sync_factor, cost.between.sync_factor
        if was != now and not (was > 0 and now > 0):
            return math.inf, 0.0
        sync = 0.0 if was == now else math.log(now / was)
        most = max(sync, *map(sum, zip(stages, own, strict=True)))
        least = min(sync, min(stages) + min(layouts, default=0.0), min(stages))
        return math.exp(float(classes.max()) + most), math.exp(float(classes.min()) + least)


@dataclass(frozen=True, slots=True)
class Bounded:
    """What a watch can say of a step under its plan."""

    most_s: float
    """Seconds under the plan, at most; inf where it may not fit."""
    least_s: float
    """Seconds under any plan, at least."""

    def within(self, delta: float) -> bool:
        """Whether the plan is within ``delta`` of the best possible."""
        return self.most_s <= (1 + delta) * self.least_s
