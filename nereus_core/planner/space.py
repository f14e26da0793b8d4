"""The planner's space: for each model-stage a table of layouts and units, its seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nereus_core.cluster import Device
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.op_classes import FloatArray, IntArray
from nereus_core.cost.shapes import Options
from nereus_core.cost.step import levels
from nereus_core.errors import NoFeasiblePlan
from nereus_core.layout import Layout, layout_problems, layouts
from nereus_core.plan import Plan
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.groups import Shape, by_node, group_sizes
from nereus_core.planner.pareto import front
from nereus_core.workload import ModelStage, Stage


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and a number of units for one model-stage."""

    layout: Layout
    dp: int


@dataclass(frozen=True, slots=True, eq=False)
class StageOptions:
    """All choices of one model-stage, one per row.

    Shapes: ``busy_s`` [crossing, option, wave], where crossing = pp crosses nodes + 2 * dp crosses.
    """

    stage: ModelStage
    level: int
    tp: IntArray
    pp: IntArray
    dp: IntArray
    busy_s: FloatArray
    persistent_bytes: FloatArray
    """[option]."""
    transient_bytes: FloatArray
    """[option, wave]."""

    def choice(self, row: int) -> Choice:
        """Return one row as a value."""
        return Choice(Layout(int(self.tp[row]), int(self.pp[row])), int(self.dp[row]))

    @property
    def num_devices(self) -> IntArray:
        """Devices each option takes."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Undominated ways for a group of stages to share one group of devices.

    Shapes: ``level_s`` [way, level]; ``rows`` [way, stage of the group] are option rows.
    """

    level_s: FloatArray
    rows: IntArray


@dataclass(slots=True)
class Space:
    """Tables, bounds and fronts of one planning problem; fronts are made when asked for."""

    cost: CostModel
    lengths: Lengths
    constraints: Constraints
    """As asked, with least numbers of units lowered to what the devices allow."""
    stages: tuple[ModelStage, ...]
    options: tuple[StageOptions, ...]
    devices: tuple[Device, ...]
    """Those a plan may use, nodes with most of them first."""
    node_sizes: tuple[int, ...]
    sizes: IntArray
    num_levels: int
    _fronts: dict[tuple[tuple[int, ...], Shape], Front] = field(default_factory=dict)
    _single: dict[tuple[int, Shape], tuple[FloatArray, IntArray]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, cost: CostModel, lengths: Lengths, constraints: Constraints, current: Plan | None
    ) -> Space:
        """Enumerate and price every choice; raises NoFeasiblePlan where a stage has none."""
        job = cost.job
        usable = [d for d in job.cluster.healthy if d not in constraints.excluded]
        if not usable:
            raise NoFeasiblePlan(0, "no device is healthy")
        nodes = by_node(usable)
        node_sizes = tuple(map(len, nodes))
        level = levels(job.workload)
        stages = job.workload.stages
        options = tuple(
            _options(cost, lengths, constraints, current, stage, level[stage], node_sizes)
            for stage in stages
        )
        attained = {o.stage: int(o.dp.min()) for o in options if o.stage in constraints.min_dp}
        return cls(
            cost,
            lengths,
            constraints.asking(attained),
            stages,
            options,
            tuple(d for node in nodes for d in node),
            node_sizes,
            group_sizes(len(usable)),
            max(level.values()) + 1,
        )

    @property
    def num_devices(self) -> int:
        """Devices a plan may use."""
        return len(self.devices)

    def objective(self, level_s: FloatArray, group_s: FloatArray) -> FloatArray:
        """Seconds of a step from the longest seconds per level and of any one group.

        The same rule as `cost.step.makespan`: stages of a group share its first device.
        """
        if not self.cost.job.workload.asynchronous:
            return np.asarray(level_s.sum(axis=-1))
        generating = {o.level for o in self.options if o.stage.stage is Stage.GENERATE}
        others = [n for n in range(self.num_levels) if n not in generating]
        return np.asarray(np.maximum(level_s[..., others].sum(axis=-1), group_s))

    def least_s(self) -> FloatArray:
        """Fewest seconds of each stage in a group of each size, were it alone there.

        Shapes: [stage, size]; inf where it does not fit. Node crossings are counted only where no
        packing avoids them, so this is a lower bound for every shape of group.
        """
        largest = self.node_sizes[0]
        least = np.full((len(self.stages), len(self.sizes)), np.inf)
        for i, o in enumerate(self.options):
            crossing = (o.tp * o.pp > largest) + 2 * ((o.dp > 1) & (o.num_devices > largest))
            fits = o.persistent_bytes[:, None] + o.transient_bytes <= self.cost.capacity_bytes
            busy = o.busy_s[crossing, np.arange(len(o.tp))]
            best = np.where(fits, busy, np.inf).min(axis=1)
            within = o.num_devices[None, :] <= self.sizes[:, None]
            least[i] = np.where(within, best[None, :], np.inf).min(axis=1)
        return least

    def front(self, block: tuple[int, ...], shape: Shape, limit_s: float, whole: bool) -> Front:
        """Undominated ways for the stages of a block to share a group of this shape.

        Args:
            block: indices of stages.
            shape: of their group.
            limit_s: ways that take longer in all may be left out.
            whole: the block is the whole job, so that only its sum of seconds matters.
        """
        key = (block, shape)
        if key not in self._fronts:  # made with a limit that was no lower: nothing is missing
            self._fronts[key] = self._shared(block, shape, limit_s, whole)
        return self._fronts[key]

    def fastest(self, stage: int, shape: Shape) -> int:
        """Option row of the stage's fastest way in such a group, whatever memory it needs."""
        o = self.options[stage]
        fits, pp_crosses, dp_crosses = shape.fitted(o.tp, o.pp, o.dp)
        busy_s = o.busy_s[pp_crosses + 2 * dp_crosses, np.arange(len(o.tp))].min(axis=1)
        return int(np.where(fits, busy_s, np.inf).argmin())

    def by_speed(self, stage: int, shape: Shape) -> list[int]:
        """Option rows of a stage's undominated ways in such a group, fastest first."""
        _, rows = self._alone(stage, shape)
        return list(dict.fromkeys(map(int, rows)))

    def _shared(self, block: tuple[int, ...], shape: Shape, limit_s: float, whole: bool) -> Front:
        n, capacity = self.num_levels, self.cost.capacity_bytes
        alone = [self._alone(stage, shape) for stage in block]
        if not all(len(own) for own, _ in alone):
            return Front(np.zeros((0, n)), np.zeros((0, len(block)), dtype=np.int64))
        # The rest of the block takes and keeps at least so much.
        rest_s = [sum(own[:, 0].min() for own, _ in alone[i + 1 :]) for i in range(len(block))]
        rest_bytes = [sum(own[:, 1].min() for own, _ in alone[i + 1 :]) for i in range(len(block))]
        level_s, memory = np.zeros((1, n)), np.zeros((1, 2))  # bytes that stay, that come and go
        rows = np.zeros((1, 0), dtype=np.int64)
        for i, (stage, (own, picked)) in enumerate(zip(block, alone, strict=True)):
            a, b = (m.ravel() for m in np.indices((len(level_s), len(own))))
            stays = memory[a, 0] + own[b, 1]
            peak = np.maximum(memory[a, 1], own[b, 2])
            total_s = level_s[a].sum(axis=1) + own[b, 0]
            keep = (stays + rest_bytes[i] + peak <= capacity) & (total_s + rest_s[i] <= limit_s)
            a, b, stays, peak, total_s = (column[keep] for column in (a, b, stays, peak, total_s))
            level_s, memory = level_s[a], np.stack([stays, peak], axis=1)
            level_s[:, self.options[stage].level] += own[b, 0]
            rows = np.concatenate([rows[a], picked[b][:, None]], axis=1)
            seconds = total_s[:, None] if whole else level_s
            kept = front(np.concatenate([seconds, memory], axis=1))
            level_s, memory, rows = level_s[kept], memory[kept], rows[kept]
        kept = front(level_s.sum(axis=1)[:, None] if whole else level_s)
        return Front(level_s[kept], rows[kept])

    def _alone(self, stage: int, shape: Shape) -> tuple[FloatArray, IntArray]:
        """Undominated (seconds, persistent, transient) of one stage, with their option rows."""
        key = (stage, shape)
        if key not in self._single:
            o = self.options[stage]
            fits, pp_crosses, dp_crosses = shape.fitted(o.tp, o.pp, o.dp)
            busy_s = o.busy_s[pp_crosses + 2 * dp_crosses, np.arange(len(o.tp))]
            need = o.persistent_bytes[:, None] + o.transient_bytes
            at, wave = np.nonzero(fits[:, None] & (need <= self.cost.capacity_bytes))
            columns = np.stack(
                [busy_s[at, wave], o.persistent_bytes[at], o.transient_bytes[at, wave]], axis=1
            )
            kept = front(columns)
            self._single[key] = (columns[kept], at[kept])
        return self._single[key]


def _options(
    cost: CostModel,
    lengths: Lengths,
    constraints: Constraints,
    current: Plan | None,
    stage: ModelStage,
    level: int,
    node_sizes: tuple[int, ...],
) -> StageOptions:
    choices = _choices(cost, constraints, current, stage, node_sizes)
    tp, pp, dp = (np.array(column, dtype=np.int64) for column in zip(*choices, strict=True))
    n = len(tp)
    table = cost.table(
        stage,
        Options(
            np.tile(tp, 4),
            np.tile(pp, 4),
            np.tile(dp, 4),
            tp_crosses=np.zeros(4 * n, dtype=np.bool_),
            pp_crosses=np.repeat(np.array([False, True, False, True]), n),
            dp_crosses=np.repeat(np.array([False, False, True, True]), n),
        ),
        lengths,
    )
    waves = len(table.waves) // (4 * n)
    return StageOptions(
        stage, level, tp, pp, dp,
        (table.seconds + table.sync_s).reshape(4, n, waves),
        table.persistent_bytes.reshape(4, n, waves)[0, :, 0],
        table.transient_bytes.reshape(4, n, waves)[0],
    )  # fmt: skip


def _choices(
    cost: CostModel,
    constraints: Constraints,
    current: Plan | None,
    stage: ModelStage,
    node_sizes: tuple[int, ...],
) -> list[tuple[int, int, int]]:
    """Every (tp, pp, dp) of a stage: tp inside a node, dp a divisor of the global batch."""
    job, total = cost.job, sum(node_sizes)
    model = job.model(stage)
    now = None if current is None else current.get(stage)
    if stage in constraints.pinned:
        pinned = constraints.pinned[stage]
        if problems := layout_problems(model, pinned):
            raise NoFeasiblePlan(total, f"{stage} is pinned to {pinned} and {problems[0]}")
        known: tuple[Layout, ...] = (pinned,)
    else:
        known = layouts(model, total, constraints.degrees)
        if now is not None and now.layout not in known and not layout_problems(model, now.layout):
            known = (*known, now.layout)  # what runs now may be kept, whatever its degrees
    units = [n for n in range(1, min(total, job.global_batch) + 1) if job.global_batch % n == 0]
    choices = [
        (layout.tp, layout.pp, dp)
        for layout in known
        if layout.tp <= node_sizes[0] and constraints.allows_layout(stage, layout)
        for dp in units
        if layout.num_devices * dp <= total and constraints.allows_change(stage, now, layout, dp)
    ]
    if not choices:
        raise NoFeasiblePlan(
            total,
            f"{stage} has no layout that its constraints and the adapter allow on nodes of "
            f"{', '.join(map(str, sorted(set(node_sizes), reverse=True)))} devices",
        )
    # A least number of units that the devices do not allow asks for as many as they do.
    least = min(constraints.min_dp.get(stage, 1), max(dp for _, _, dp in choices))
    return [choice for choice in choices if choice[2] >= least]
