"""What a model-stage may choose from: layouts and numbers of units, and how they lie on nodes."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from nereus_core.cost.op_classes import BoolArray, IntArray
from nereus_core.errors import NoFeasiblePlan
from nereus_core.layout import Layout, stage_layouts, stage_problems
from nereus_core.plan import Plan
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.groups import Shape
from nereus_core.workload import Job, ModelStage

Choices = tuple[tuple[int, int, int], ...]
"""(tp, pp, dp) of every way to lay out a stage."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and a number of units for one model-stage."""

    layout: Layout
    dp: int


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Choices as columns, one per row; stages with the same choices share one."""

    tp: IntArray
    pp: IntArray
    dp: IntArray
    _fitted: dict[Shape, tuple[BoolArray, IntArray]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, choices: Choices) -> Self:
        """Turn rows into columns."""
        tp, pp, dp = np.array(choices, dtype=np.int64).T.copy()
        return cls(tp, pp, dp)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_devices(self) -> IntArray:
        """Devices each choice takes."""
        return self.tp * self.pp * self.dp

    def forced(self, largest: int) -> IntArray:
        """Crossings that no packing avoids on nodes of at most so many devices.

        As everywhere in the planner: 1 where pp crosses nodes, plus 2 where dp does.
        """
        pp_crosses = self.tp * self.pp > largest
        return pp_crosses + 2 * ((self.dp > 1) & (self.num_devices > largest))

    def reachable(self, largest: int) -> BoolArray:
        """Which crossings a group can ask of each choice [crossing, choice]."""
        forced = self.forced(largest)
        found = np.zeros((4, len(self)), dtype=np.bool_)
        for crossing in range(4):
            possible = ((crossing % 2 == 0) | (self.pp > 1)) & ((crossing < 2) | (self.dp > 1))
            found[crossing] = possible & (forced & ~crossing == 0)
        return found

    def fitted(self, shape: Shape) -> tuple[BoolArray, IntArray]:
        """Per choice: whether it fits a group of this shape, and what it crosses there."""
        if shape not in self._fitted:
            fits, pp_crosses, dp_crosses = shape.fitted(self.tp, self.pp, self.dp)
            self._fitted[shape] = (fits, pp_crosses + 2 * dp_crosses)
        return self._fitted[shape]


def choices_of(
    job: Job,
    constraints: Constraints,
    current: Plan | None,
    stage: ModelStage,
    node_sizes: tuple[int, ...],
) -> Choices:
    """Every (tp, pp, dp) of a stage: tp inside a node, dp a divisor of the global batch.

    Where the job keeps units of the stage within a node, tp x pp is inside a node.

    Raises:
        NoFeasiblePlan: the stage has none.
    """
    total = sum(node_sizes)
    now = None if current is None else current.get(stage)
    if stage in constraints.pinned:
        pinned = constraints.pinned[stage]
        if problems := stage_problems(job, stage, pinned):
            raise NoFeasiblePlan(total, f"{stage} is pinned to {pinned} and {problems[0]}")
        for name, degree, most in (
            ("max_tp", pinned.tp, constraints.max_tp),
            ("max_pp", pinned.pp, constraints.max_pp),
        ):
            if most is not None and degree > most:
                raise NoFeasiblePlan(total, f"{stage} is pinned to {pinned} and {name} is {most}")
        known: tuple[Layout, ...] = (pinned,)
    else:
        known = stage_layouts(job, stage, total, constraints.degrees)
        if now and now.layout not in known and not stage_problems(job, stage, now.layout):
            known = (*known, now.layout)  # what runs now may be kept, whatever its degrees
    units = _divisors(job.global_batch, total)
    free = job.device_batch is None and job.unit_batch is None and not job.micro_tokens
    inside = stage in job.within_node
    choices = [
        (layout.tp, layout.pp, dp)
        for layout in known
        if (layout.num_devices if inside else layout.tp) <= node_sizes[0]
        and constraints.allows_layout(stage, layout)
        for dp in units[: bisect_right(units, total // layout.num_devices)]
        if now is None or constraints.allows_change(stage, now, layout, dp)
        if free or job.share_problem(stage, layout.num_devices * dp, dp) is None
    ]
    if not choices:
        raise NoFeasiblePlan(
            total,
            f"{stage} has no layout that its constraints and the adapter allow on nodes of "
            f"{', '.join(map(str, sorted(set(node_sizes), reverse=True)))} devices",
        )
    # A least number of units that the devices do not allow asks for as many as they do.
    least = min(constraints.min_dp.get(stage, 1), max(dp for _, _, dp in choices))
    return tuple(choice for choice in choices if choice[2] >= least)


def _divisors(number: int, most: int) -> tuple[int, ...]:
    """Divisors of a number up to some size, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({d for n in low for d in (n, number // n) if d <= most}))
