"""CostModel: what the planner and admission ask for seconds and bytes. Immutable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Self

import numpy as np

from nereus_core.cluster import Device
from nereus_core.cost.efficiency import EfficiencyTable, Work
from nereus_core.cost.interval import Interval
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.memory import StageBytes, stage_bytes
from nereus_core.cost.step import StepCost, step_seconds
from nereus_core.cost.transition import FIXED_S, busiest_seconds
from nereus_core.cost.work import Span, stage_work
from nereus_core.layout import Layout
from nereus_core.observation import Observation
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Primitive
from nereus_core.units import UnitMap
from nereus_core.workload import Job, ModelStage

__all__ = ["CostModel", "EfficiencyTable", "Interval", "Lengths", "StageBytes", "StepCost"]

_TRANSITION_SIGMA = 0.5  # of log seconds before any transition was measured; chosen
_TRANSITION_NOISE = 0.25  # of one measured transition, in log; chosen
_STEP_NOISE = 0.05  # of log step seconds that no calibration removes; chosen, not measured


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts a job from shapes, hardware and what was measured so far."""

    job: Job
    efficiencies: EfficiencyTable = field(default_factory=EfficiencyTable.prior)
    headroom: float = 0.1
    """Part of a device's memory that no plan may use."""
    confidence: float = 0.9
    transition_log_factor: float = 0.0
    transition_variance: float = _TRANSITION_SIGMA**2

    def on(self, job: Job) -> Self:
        """Keep the calibration on another state of the cluster."""
        return replace(self, job=job)

    # --- Seconds --------------------------------------------------------------------------------

    def stage_s(self, stage: ModelStage, placement: Placement, lengths: Lengths) -> float:
        """Predict the seconds of one model-stage under a placement."""
        return self.efficiencies.seconds(stage, self._work(stage, placement, lengths))

    def layout_s(
        self, stage: ModelStage, layout: Layout, dp: int, lengths: Lengths, span: Span
    ) -> float:
        """Predict the same before devices are chosen."""
        work = stage_work(self.job, stage, layout, dp, lengths, span)
        return self.efficiencies.seconds(stage, work)

    def step(self, plan: Plan, lengths: Lengths) -> StepCost:
        """Predict one RL step."""
        stage_s = {stage: self.stage_s(stage, plan[stage], lengths) for stage in plan}
        mean = step_seconds(self.job.workload, stage_s, plan.sharing)
        slopes = self._slopes(plan, lengths)
        variance = float(np.sum((slopes * self.efficiencies.sigma) ** 2))
        spread = self._z * math.sqrt(variance + (_STEP_NOISE * mean) ** 2)
        return StepCost(Interval.around(mean, spread), stage_s)

    def saving(self, current: Plan, candidate: Plan, lengths: Lengths) -> Interval:
        """Predict seconds saved per step; what both plans share in uncertainty cancels."""
        now, then = self.step(current, lengths), self.step(candidate, lengths)
        mean = now.step.mean_s - then.step.mean_s
        slopes = self._slopes(current, lengths) - self._slopes(candidate, lengths)
        return Interval.around(
            mean, self._z * float(np.linalg.norm(slopes * self.efficiencies.sigma))
        )

    def primitive(self, op: Primitive, units: UnitMap) -> Interval:
        """Predict one primitive."""
        mean = (FIXED_S + busiest_seconds(self.job, op, units)) * math.exp(
            self.transition_log_factor
        )
        width = math.exp(self._z * math.sqrt(self.transition_variance))
        return Interval(mean, mean / width, mean * width)

    # --- Bytes ----------------------------------------------------------------------------------

    def stage_bytes(
        self, stage: ModelStage, layout: Layout, dp: int, lengths: Lengths
    ) -> StageBytes:
        """Return what a stage needs on the fullest device of a unit."""
        return stage_bytes(self.job, stage, layout, dp, lengths)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of a device that plans may use."""
        return int(self.job.cluster.device_spec.memory_bytes * (1 - self.headroom))

    def memory(self, plan: Plan, lengths: Lengths) -> Mapping[Device, int]:
        """Predict peak bytes per device: what stays adds up, what comes and goes does not."""
        resident: dict[Device, int] = dict.fromkeys(sorted(plan.devices), 0)
        transient: dict[Device, int] = dict.fromkeys(resident, 0)
        for stage, placement in plan.items():
            needs = self.stage_bytes(stage, placement.layout, placement.dp, lengths)
            for device in placement.devices:
                resident[device] += needs.resident
                transient[device] = max(transient[device], needs.transient)
        return {device: resident[device] + transient[device] for device in resident}

    def memory_problem(self, plan: Plan, lengths: Lengths) -> str | None:
        """Name the device that lacks most, or None when the plan fits with headroom."""
        need = self.memory(plan, lengths)
        worst = max(need, key=lambda d: need[d])
        if need[worst] <= self.capacity_bytes:
            return None
        return (
            f"{worst} needs {need[worst] / 2**30:.2f} GiB of {self.capacity_bytes / 2**30:.2f} GiB "
            f"usable ({self.headroom:.0%} headroom kept)"
        )

    # --- Calibration ----------------------------------------------------------------------------

    def refined(self, plan: Plan, seen: Observation) -> Self:
        """Learn from the measured stage seconds of a step that ran under ``plan``."""
        lengths = Lengths.of(seen)
        measured = {
            stage: (self._work(stage, plan[stage], lengths), seconds)
            for stage, seconds in seen.stage_s.items()
            if stage in plan
        }
        return replace(self, efficiencies=self.efficiencies.refined(measured))

    def refined_transition(self, predicted_s: float, measured_s: float) -> Self:
        """Learn from one transition: a scalar Kalman step on the log ratio."""
        if predicted_s <= 0 or measured_s <= 0:
            return self
        gain = self.transition_variance / (self.transition_variance + _TRANSITION_NOISE**2)
        return replace(
            self,
            transition_log_factor=self.transition_log_factor
            + gain * math.log(measured_s / predicted_s),
            transition_variance=self.transition_variance * (1 - gain) + 0.1 * _TRANSITION_NOISE**2,
        )

    # --- Inside ---------------------------------------------------------------------------------

    @property
    def _z(self) -> float:
        return NormalDist().inv_cdf((1 + self.confidence) / 2)

    def _work(self, stage: ModelStage, placement: Placement, lengths: Lengths) -> Work:
        return stage_work(
            self.job, stage, placement.layout, placement.dp, lengths, span_of(placement)
        )

    def _slopes(self, plan: Plan, lengths: Lengths) -> Work:
        """Return d(step seconds) / d(log inverse efficiency) per class, by finite differences."""
        inverse = self.efficiencies.inverse
        parts = {
            stage: self._work(stage, plan[stage], lengths)
            * inverse
            * self.efficiencies.factor(stage)
            for stage in plan
        }

        def step_at(scale: Work) -> float:
            seconds = {stage: float(p @ scale) for stage, p in parts.items()}
            return step_seconds(self.job.workload, seconds, plan.sharing)

        flat, nudge = np.ones(len(inverse)), 1e-4
        base = step_at(flat)
        return np.array(
            [(step_at(flat + nudge * row) - base) / nudge for row in np.eye(len(inverse))]
        )


def span_of(placement: Placement) -> Span:
    """Say which groups of a placement cross nodes."""
    tp, pp = placement.layout.tp, placement.layout.pp

    def crosses(groups: list[list[Device]]) -> bool:
        return any(len({d.node for d in group}) > 1 for group in groups)

    tp_groups = [list(u[i * tp : (i + 1) * tp]) for u in placement.units for i in range(pp)]
    pp_groups = [list(u[i::tp]) for u in placement.units for i in range(tp)]
    dp_groups = [[u[i] for u in placement.units] for i in range(tp * pp)]
    return Span(crosses(tp_groups), crosses(pp_groups), crosses(dp_groups))
