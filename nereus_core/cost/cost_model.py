"""CostModel: seconds and bytes of plans and primitives, from shapes and calibrated efficiencies."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from nereus_core.cluster import Device
from nereus_core.cost.corrections import Between
from nereus_core.cost.coverage import NOISE, Coverage
from nereus_core.cost.curves import Curves, curves_of
from nereus_core.cost.efficiency import EfficiencyTable
from nereus_core.cost.interval import Interval
from nereus_core.cost.kernels import prior_fractions
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.moving import Moving
from nereus_core.cost.op_classes import FloatArray
from nereus_core.cost.peaks import Peaks
from nereus_core.cost.shapes import Options
from nereus_core.cost.stage_table import Known, StageTable, stage_table
from nereus_core.cost.step import Cell, StepCost, makespan, options_of, regions
from nereus_core.cost.transition import primitive_work
from nereus_core.layout import Layout
from nereus_core.observation import Observation
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Primitive
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import Job, ModelStage

_RESIZED = 0.03
"""Relative error left when a layout that was seen meets another number of units; chosen."""
_PRIOR = cast(EfficiencyTable, None)
"""Stands for the conservative prior of the job's cluster."""
_AS_STAGES = cast(Moving, None)
"""Stands for what classes take in stages."""


def _spread(step_s: float, deviation_s: float) -> float:
    """Deviation of the log of one measured step: the model's own, and the noise of measuring."""
    return math.hypot(deviation_s / step_s, NOISE)


@dataclass(frozen=True, slots=True, eq=False)
class _Stages:
    """A plan's stages with what was computed for each: one row of work per stage."""

    work: Mapping[ModelStage, FloatArray]
    sync: Mapping[ModelStage, FloatArray]
    layout: Mapping[ModelStage, Layout]


@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    """An immutable value; what it computed it keeps. `refined` and `on` return others."""

    job: Job
    efficiencies: EfficiencyTable = _PRIOR
    """The conservative prior where none is given."""
    headroom: float = 0.1
    """Part of a device's memory that no plan may use."""
    confidence: float = 0.9
    """With which each bound of an interval holds."""
    between: Between = field(default_factory=Between)
    moving: Moving = _AS_STAGES
    """How transitions go; as `efficiencies` say where none was seen."""
    peaks: Peaks = field(default_factory=Peaks)
    coverage: Coverage = field(default_factory=Coverage)
    curves: Curves | None = None
    """What is known for the job's kind of device where none is given."""
    # Kept by identity (hashing a thousand devices takes longer), with the object so that it lives.
    _tables: dict[tuple[ModelStage, int, Lengths], tuple[Placement, StageTable]] = field(
        default_factory=dict, init=False, repr=False
    )
    _met: dict[int, tuple[Plan, Mapping[Cell, frozenset[Device]]]] = field(
        default_factory=dict, init=False, repr=False
    )

    _elsewhere: CostModel | None = field(default=None, init=False, repr=False)
    """The model that `on` returned last, with what it computed."""

    def __post_init__(self) -> None:
        if self.efficiencies is _PRIOR:
            prior = EfficiencyTable.prior(self.job.cluster, prior_fractions(self.job.cluster))
            object.__setattr__(self, "efficiencies", prior)
        if self.moving is _AS_STAGES:
            object.__setattr__(self, "moving", Moving.unseen(self.efficiencies.log_inverse))

    @property
    def capacity_bytes(self) -> int:
        """Bytes of a device that a plan may use."""
        return int(self.job.cluster.device_spec.memory_bytes * (1 - self.headroom))

    @property
    def _curves(self) -> Curves:
        return self.curves or curves_of(self.job.cluster.device_spec)

    def on(self, job: Job) -> CostModel:
        """Return the same calibration for another state of the job's cluster.

        The same model while the same job is asked for: several looks at a boundary share tables.
        """
        found = self._elsewhere
        if found is None or found.job is not job:
            found = replace(self, job=job)
            object.__setattr__(self, "_elsewhere", found)
        return found

    def step(self, plan: Plan, lengths: Lengths) -> StepCost:
        """Predict the seconds of one RL step."""
        stages = self._stages(plan, lengths)
        seconds, sync_s = self._seconds(stages)
        busy_s = {s: seconds[s] + sync_s[s] for s in plan}
        total, critical = makespan(self.job.workload, busy_s, self._regions(plan))
        deviation = self.efficiencies.deviation(self._parts(stages, critical, 1.0))
        total += self.between.seconds
        step = self._interval(total, deviation)
        return StepCost(step, seconds, {s: t for s, t in sync_s.items() if t > 0}, critical)

    def _interval(self, step_s: float, deviation_s: float) -> Interval:
        """Bounds that hold as often as they say, by what earlier steps missed theirs by."""
        width = math.exp(self.coverage.deviations(self.confidence) * _spread(step_s, deviation_s))
        return Interval(step_s, step_s / width, step_s * width)

    def saving(self, current: Plan, candidate: Plan, lengths: Lengths) -> Interval:
        """Predict how many seconds per step a candidate is faster; what both share cancels.

        The bounds come from the uncertainty of the classes, layouts and numbers of units that
        differ.
        """
        before, after = self.step(current, lengths), self.step(candidate, lengths)
        parts = self._parts(self._stages(current, lengths), before.critical, 1.0)
        parts += self._parts(self._stages(candidate, lengths), after.critical, -1.0)
        deviation = self.efficiencies.deviation(parts)
        resized = [s for s in after.critical if current[s].dp != candidate[s].dp]
        misfit = math.hypot(*(_RESIZED * after.stage_s[s] for s in resized))
        mean_s = before.step.mean_s - after.step.mean_s
        return Interval.absolute(mean_s, math.hypot(deviation, misfit), self.confidence)

    def table(self, stage: ModelStage, options: Options, lengths: Lengths) -> StageTable:
        """Predict many ways to run one stage at once; each option once per number of waves."""
        known = Known(self.efficiencies, self.between, self.peaks, self._curves)
        return stage_table(self.job, stage, options, lengths, known)

    def memory(self, plan: Plan, lengths: Lengths) -> Mapping[Device, int]:
        """Predict peak bytes per device in use, headroom not counted."""
        need = self._need(plan, lengths)
        met = self._regions(plan)
        return {device: need[cell] for cell in need for device in met[cell]}

    def memory_problem(self, plan: Plan, lengths: Lengths) -> str | None:
        """Say which device lacks most memory and how much it needs, or None when all fit."""
        need = self._need(plan, lengths)
        most = max(need.values())
        if most <= self.capacity_bytes:
            return None
        met = self._regions(plan)
        device = min(d for cell in need if need[cell] == most for d in met[cell])
        there = ", ".join(f"{s}={p}" for s, p in plan.items() if device in p.devices)
        return (
            f"{device} needs {most / 2**30:.2f} GiB for {there} "
            f"and has {self.capacity_bytes / 2**30:.2f} GiB with {self.headroom:.0%} headroom"
        )

    def primitive(self, op: Primitive, units: UnitMap, parked: Container[UnitId] = ()) -> Interval:
        """Predict the seconds of one primitive on these units, some of which lie in host memory."""
        work = primitive_work(self.job, op, units, parked)
        return self.moving.predicted(work, self.confidence)

    def refined(self, plan: Plan, observation: Observation) -> CostModel:
        """Learn from a measured step under a plan; a step without responses teaches nothing."""
        if not observation.response_tokens.count:
            return self
        lengths = Lengths.of(observation)
        stages = self._stages(plan, lengths)
        measured_s = {s: t for s, t in observation.stage_s.items() if s in plan and t > 0}
        efficiencies = self.efficiencies.refined(
            {s: (plan[s].layout, stages.work[s], t) for s, t in sorted(measured_s.items())},
            efficiency=observation.efficiency,
            first_step=observation.step <= 0,
        )
        refined = replace(
            self,
            efficiencies=efficiencies,
            peaks=self._peaks_seen(plan, lengths, observation.peak_bytes),
        )
        if set(measured_s) == set(plan) and observation.step > 0 and observation.step_s > 0:
            inverse, met = efficiencies.inverse, self._regions(plan)
            synced = {s: t + float(stages.sync[s] @ inverse) for s, t in measured_s.items()}
            alone_s, _ = makespan(self.job.workload, measured_s, met)
            synced_s, _ = makespan(self.job.workload, synced, met)
            between = self.between.seen(observation.step_s - alone_s, synced_s - alone_s)
            coverage = self._coverage_seen(plan, lengths, observation.step_s)
            refined = replace(refined, between=between, coverage=coverage)
        return refined

    def _coverage_seen(self, plan: Plan, lengths: Lengths, measured_s: float) -> Coverage:
        """Compare a step with what was predicted before it, given its lengths."""
        stages = self._stages(plan, lengths)
        predicted = self.step(plan, lengths)
        step_s = predicted.step.mean_s
        deviation_s = self.efficiencies.deviation(self._parts(stages, predicted.critical, 1.0))
        miss = abs(math.log(measured_s / step_s)) / _spread(step_s, deviation_s)
        return self.coverage.seen(miss, self.confidence)

    def _peaks_seen(self, plan: Plan, lengths: Lengths, measured: Mapping[Device, int]) -> Peaks:
        """Correct, per region of devices, the stages whose need its measured peak contradicts."""
        rows = {
            s: (t, -1 if at is None else at) for s, (t, at) in self._rows(plan, lengths).items()
        }
        peaks = self.peaks
        for cell, devices in self._regions(plan).items():
            highest = max((measured.get(d, 0) for d in devices), default=0)
            if highest <= 0:
                continue
            runs = {s: float(rows[s][0].transient_bytes[rows[s][1]]) for s in sorted(cell)}
            stays = sum(float(rows[s][0].persistent_bytes[rows[s][1]]) for s in runs)
            # The largest need made the peak, and none of the others can have been larger than it.
            for stage, run in runs.items():
                if run == max(runs.values()) or run > highest - stays:
                    uncorrected = run / self.peaks.factor(stage)
                    peaks = peaks.seen(stage, uncorrected, highest - stays)
        return peaks

    def refined_transition(
        self,
        path: Sequence[Primitive],
        units: UnitMap,
        measured_s: float,
        parked: Container[UnitId] = (),
    ) -> CostModel:
        """Learn from a finished transition.

        Args:
            path: the primitives that followed one another longest.
            units: every unit that they name.
            measured_s: seconds that the job was held.
            parked: units that host memory kept.
        """
        if not path or not 0 < measured_s < math.inf:  # a clock that went wrong teaches nothing
            return self
        work = np.sum([primitive_work(self.job, op, units, parked) for op in path], axis=0)
        return replace(self, moving=self.moving.seen(work, measured_s, self.confidence))

    def _stages(self, plan: Plan, lengths: Lengths) -> _Stages:
        # A plan that does not fit is priced as if it did, so that it can be compared at all.
        rows = {s: (table, row or 0) for s, (table, row) in self._rows(plan, lengths).items()}
        return _Stages(
            {s: table.work[row] for s, (table, row) in rows.items()},
            {s: table.sync_work[row] for s, (table, row) in rows.items()},
            {s: placement.layout for s, placement in plan.items()},
        )

    def _seconds(self, stages: _Stages) -> tuple[dict[ModelStage, float], dict[ModelStage, float]]:
        inverse, factor = self.efficiencies.inverse, self.between.sync_factor
        seconds = {
            s: self.efficiencies.seconds(s, stages.layout[s], w) for s, w in stages.work.items()
        }
        return seconds, {s: float(w @ inverse) * factor for s, w in stages.sync.items()}

    def _parts(
        self, stages: _Stages, critical: tuple[ModelStage, ...], sign: float
    ) -> list[tuple[ModelStage | None, Layout | None, FloatArray]]:
        """Signed seconds per class of the critical stages and their synchronizations."""
        inverse, factor = self.efficiencies.inverse, self.between.sync_factor
        parts: list[tuple[ModelStage | None, Layout | None, FloatArray]] = []
        for s in critical:
            layout = stages.layout[s]
            seconds = self.efficiencies.residual(s, layout) * stages.work[s] * inverse
            parts.append((s, layout, sign * seconds))
            parts.append((None, None, sign * factor * stages.sync[s] * inverse))
        return parts

    def _rows(
        self, plan: Plan, lengths: Lengths
    ) -> Mapping[ModelStage, tuple[StageTable, int | None]]:
        """Each stage's table, and the row of the fewest rounds that fit beside what stays there.

        The row is None where none fits.
        """
        tables = {stage: self._placed(stage, p, lengths) for stage, p in plan.items()}
        met = self._regions(plan)
        found: dict[ModelStage, tuple[StageTable, int | None]] = {}
        for stage, table in tables.items():
            beside = max(
                sum(float(tables[s].persistent_bytes[0]) for s in cell)
                for cell in met
                if stage in cell
            )
            fitting = table.transient_bytes + beside <= self.capacity_bytes
            found[stage] = (table, int(fitting.argmax()) if fitting.any() else None)
        return found

    def _need(self, plan: Plan, lengths: Lengths) -> Mapping[Cell, int]:
        """Peak bytes of each device of a region: what stays adds up, the largest of what runs."""
        stays, runs = {}, {}
        for stage, (table, fitting) in self._rows(plan, lengths).items():
            row = -1 if fitting is None else fitting  # the last row needs least
            stays[stage] = float(table.persistent_bytes[row])
            runs[stage] = float(table.transient_bytes[row])
        return {
            cell: math.ceil(sum(stays[s] for s in sorted(cell)) + max(runs[s] for s in cell))
            for cell in self._regions(plan)
        }

    def remember(self, placement: Placement, table: StageTable, lengths: Lengths) -> None:
        """Keep the table of one placement, priced among others, so that it is not priced again."""
        self._tables.setdefault((table.stage, id(placement), lengths), (placement, table))

    def _placed(self, stage: ModelStage, placement: Placement, lengths: Lengths) -> StageTable:
        """The table of one placement; kept, because plans to compare differ in few stages."""
        key = (stage, id(placement), lengths)
        if key not in self._tables:
            table = self.table(stage, options_of(placement), lengths)
            self._tables[key] = (placement, table)
        return self._tables[key][1]

    def _regions(self, plan: Plan) -> Mapping[Cell, frozenset[Device]]:
        if id(plan) not in self._met:
            self._met[id(plan)] = (plan, regions(plan))
        return self._met[id(plan)][1]
