"""The planner's space: for each model-stage a table of layouts and units, its seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from nereus_core.cluster import Device
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.op_classes import BoolArray, FloatArray, IntArray
from nereus_core.cost.shapes import Options
from nereus_core.cost.stage_table import StageTable
from nereus_core.cost.step import levels
from nereus_core.errors import NoFeasiblePlan
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.planner.choices import Choice, Choices, Grid, choices_of
from nereus_core.planner.colocating import Alone, Front, colocated
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.groups import Shape, by_node, group_sizes, shape_between
from nereus_core.planner.pareto import front
from nereus_core.workload import ModelStage, Stage


@dataclass(frozen=True, slots=True, eq=False)
class StageOptions:
    """All choices of one model-stage, one per row.

    Shapes: ``busy_s`` [crossing, option, wave], where crossing = pp crosses nodes + 2 * dp crosses;
    inf where no group makes an option cross so.
    """

    stage: ModelStage
    level: int
    grid: Grid
    busy_s: FloatArray
    persistent_bytes: FloatArray
    """[option]."""
    transient_bytes: FloatArray
    """[option, wave]."""
    table: StageTable
    first_row: IntArray
    """In the table [crossing, option]; an option's rows, one per wave, follow each other."""
    whole: bool = False
    """Whether the stage takes every device of its group: `Job.together`."""
    inside: bool = False
    """Whether each of its units lies on one node: `Job.within_node`."""

    def fitted(self, shape: Shape) -> tuple[BoolArray, IntArray]:
        """Per choice: whether it may be had in a group of this shape, and what it crosses there."""
        fits, crossing = self.grid.fitted(shape)
        if self.whole:
            fits = fits & (self.grid.num_devices == shape.num_devices)
        if self.inside:
            fits = fits & (crossing % 2 == 0)
        return fits, crossing

    def priced(self, row: int, shape: Shape) -> StageTable:
        """Return the table of one option in a group of this shape."""
        _, crossing = self.grid.fitted(shape)
        start = int(self.first_row[crossing[row], row])
        return self.table.rows(start, start + self.transient_bytes.shape[1])

    def choice(self, row: int) -> Choice:
        """Return one row as a value."""
        grid = self.grid
        return Choice(Layout(int(grid.tp[row]), int(grid.pp[row])), int(grid.dp[row]))

    def least(self, sizes: IntArray, capacity_bytes: float) -> FloatArray:
        """Fewest seconds in a group of each size, alone there; inf where nothing fits.

        Whatever is crossed (a link between nodes may be the faster one), so this is a lower bound
        for every shape of group.
        """
        need = self.persistent_bytes[:, None] + self.transient_bytes
        busy_s = self.busy_s.min(axis=0)
        seconds = np.where(need <= capacity_bytes, busy_s, np.inf).min(axis=1)
        order = np.argsort(self.grid.num_devices, kind="stable")
        so_far = np.minimum.accumulate(seconds[order])
        at = np.searchsorted(self.grid.num_devices[order], sizes, side="right") - 1
        return np.where(at >= 0, so_far[at], np.inf)


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
    _single: dict[tuple[int, Shape], Alone] = field(default_factory=dict)

    @classmethod
    def of(
        cls, cost: CostModel, lengths: Lengths, constraints: Constraints, current: Plan | None
    ) -> Space:
        """Enumerate and price every choice; raises NoFeasiblePlan where a stage has none."""
        job = cost.job
        usable = [d for d in job.cluster.healthy if d not in constraints.excluded]
        if not usable:
            why = "every healthy device is excluded" if job.cluster.healthy else None
            raise NoFeasiblePlan(0, why or "no device is healthy")
        nodes = by_node(usable)
        node_sizes = tuple(map(len, nodes))
        level = levels(job.workload)
        stages = job.workload.stages
        grids: dict[Choices, Grid] = {}
        options = []
        for stage in stages:
            choices = choices_of(cost.job, constraints, current, stage, node_sizes)
            if choices not in grids:
                grids[choices] = Grid.of(choices)
            grid = grids[choices]
            options.append(_options(cost, lengths, stage, level[stage], grid, node_sizes[0]))
        attained = {o.stage: int(o.grid.dp.min()) for o in options if o.stage in constraints.min_dp}
        return cls(
            cost,
            lengths,
            constraints.asking(attained),
            stages,
            tuple(options),
            tuple(chain.from_iterable(nodes)),
            node_sizes,
            group_sizes(len(usable)),
            max(level.values()) + 1,
        )

    def reshaped(self, lengths: Lengths) -> Space:
        """Return the same choices, priced for responses of another shape and the same sizes.

        Nothing but generation depends on the shape.
        """
        largest = self.node_sizes[0]
        options = tuple(
            _options(self.cost, lengths, o.stage, o.level, o.grid, largest)
            if o.stage.stage is Stage.GENERATE
            else o
            for o in self.options
        )
        return replace(self, lengths=lengths, options=options, _fronts={}, _single={})

    @property
    def num_devices(self) -> int:
        """Devices a plan may use."""
        return len(self.devices)

    @property
    def together(self) -> tuple[frozenset[int], ...]:
        """Stages that must share devices, by index."""
        index = {stage: i for i, stage in enumerate(self.stages)}
        return tuple(
            frozenset(index[s] for s in group if s in index)
            for group in (*self.constraints.colocate, *self.cost.job.together)
        )

    @property
    def apart(self) -> tuple[frozenset[int], ...]:
        """Stages no two of which may share devices, by index."""
        if not self.constraints.colocation:
            return (frozenset(range(len(self.stages))),)
        index = {stage: i for i, stage in enumerate(self.stages)}
        return tuple(
            frozenset(index[s] for s in group if s in index) for group in self.constraints.apart
        )

    @property
    def shareable(self) -> bool:
        """Whether all stages may be on one group of devices."""
        return all(len(group) < 2 for group in self.apart)

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
        """Fewest seconds of each stage in a group of each size, were it alone there [stage, size].

        A lower bound for every shape of group.
        """
        return np.stack([o.least(self.sizes, self.cost.capacity_bytes) for o in self.options])

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
            alone = [self._alone(stage, shape) for stage in block]
            self._fronts[key] = colocated(
                alone, self.num_levels, self.cost.capacity_bytes, limit_s, whole
            )
        return self._fronts[key]

    def fastest(self, stage: int, shape: Shape) -> int:
        """Option row of the stage's fastest way in such a group, whatever memory it needs."""
        o = self.options[stage]
        fits, crossing = o.fitted(shape)
        busy_s = o.busy_s[crossing, np.arange(len(crossing))].min(axis=1)
        return int(np.where(fits, busy_s, np.inf).argmin())

    def by_speed(self, stage: int, shape: Shape) -> list[int]:
        """Option rows of a stage's undominated ways in such a group, fastest first."""
        return list(dict.fromkeys(map(int, self._alone(stage, shape).rows)))

    def alone_together(self) -> list[Alone]:
        """Undominated ways of every stage alone on all devices."""
        shape = shape_between(self.node_sizes, 0, self.num_devices)
        return [self._alone(stage, shape) for stage in range(len(self.stages))]

    def _alone(self, stage: int, shape: Shape) -> Alone:
        """Undominated ways of one stage alone in a group of this shape."""
        key = (stage, shape)
        if key not in self._single:
            o = self.options[stage]
            fits, crossing = o.fitted(shape)
            rows = np.flatnonzero(fits)
            busy_s = o.busy_s[crossing[rows], rows]
            need = o.persistent_bytes[rows, None] + o.transient_bytes[rows]
            at, wave = np.nonzero(need <= self.cost.capacity_bytes)
            at, busy_s = rows[at], busy_s[at, wave]
            columns = np.stack(
                [busy_s, o.persistent_bytes[at], o.transient_bytes[at, wave]], axis=1
            )
            kept = front(columns)
            self._single[key] = Alone(columns[kept], at[kept], o.level)
        return self._single[key]


def _options(
    cost: CostModel, lengths: Lengths, stage: ModelStage, level: int, grid: Grid, largest: int
) -> StageOptions:
    """Price every choice of a stage, for every way to cross nodes that a group can ask for."""
    crossing, row = np.nonzero(grid.reachable(largest))
    table = cost.table(
        stage,
        Options(
            grid.tp[row],
            grid.pp[row],
            grid.dp[row],
            tp_crosses=np.zeros(len(row), dtype=np.bool_),
            pp_crosses=crossing % 2 == 1,
            dp_crosses=crossing >= 2,
        ),
        lengths,
    )
    waves = len(table.waves) // len(row)
    busy_s = np.full((4, len(grid), waves), np.inf)
    busy_s[crossing, row] = (table.seconds + table.sync_s).reshape(-1, waves)
    # Bytes do not depend on what is crossed: any row of an option will do.
    persistent, transient = np.empty(len(grid)), np.empty((len(grid), waves))
    persistent[row] = table.persistent_bytes.reshape(-1, waves)[:, 0]
    transient[row] = table.transient_bytes.reshape(-1, waves)
    first_row = np.full((4, len(grid)), -1)
    first_row[crossing, row] = np.arange(len(row)) * waves
    whole = any(stage in group for group in cost.job.together)
    inside = stage in cost.job.within_node
    return StageOptions(
        stage, level, grid, busy_s, persistent, transient, table, first_row, whole, inside
    )
