"""EfficiencyTable: inverse efficiency per class with its uncertainty, refined after every step.

Seconds are linear in inverse efficiencies, so calibration is a regression of measured stage seconds
on work. It is done online and in log space, as an extended Kalman filter whose innovations are
clipped (robust against one slow step) and whose efficiencies are bounded to (0, 1]. What the
classes cannot explain of one model-stage (a framework's own overhead, cores shared by several
seats) goes into a factor of that stage, so that the running plan is predicted closely while other
layouts still share what was learned about the classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nereus_core.cost.op_classes import OpClass
from nereus_core.workload import ModelStage

CLASSES = tuple(OpClass)
Work = NDArray[np.float64]
"""Seconds at peak rates per class, in the order of CLASSES."""

# Conservative starts: an unseen class should disappoint nobody. Chosen, not measured.
_PRIOR = {
    OpClass.GEMM: 0.4,
    OpClass.ATTENTION: 0.25,
    OpClass.DECODE: 0.4,
    OpClass.OPTIMIZER: 0.4,
    OpClass.COPY: 0.4,
    OpClass.LAUNCH: 0.5,
    OpClass.INTRA_NODE: 0.4,
    OpClass.INTER_NODE: 0.3,
}
_PRIOR_SIGMA = 0.5  # of log efficiency: a factor 1.65 either way; chosen, not measured
_NOISE_SIGMA = 0.15  # of one measured stage time, in log; chosen, not measured
_DRIFT = 0.02  # variance of log efficiency gained per step, so that the table never freezes; chosen
_CLIP = 1.0  # largest log innovation believed at once (a factor e); chosen, not measured
_STAGE_RATE = 0.5  # share of the unexplained rest that a stage's factor takes per step; chosen
_FLOOR = math.log(1e-4)  # efficiencies are not believed to be lower; chosen


@dataclass(frozen=True, slots=True)
class EfficiencyTable:
    """Log efficiencies, their variances, and a log factor per model-stage."""

    log_efficiency: tuple[float, ...]
    variance: tuple[float, ...]
    stage_log_factor: Mapping[ModelStage, float] = field(default_factory=dict)
    observations: int = 0

    @classmethod
    def prior(cls, known: Mapping[OpClass, float] | None = None) -> Self:
        """Start from conservative values, or from calibrated ones where given."""
        given = dict(known or {})
        logs = tuple(math.log(given.get(c, _PRIOR[c])) for c in CLASSES)
        return cls(logs, tuple((0.1 if c in given else _PRIOR_SIGMA) ** 2 for c in CLASSES))

    @property
    def inverse(self) -> Work:
        """Inverse efficiencies, in the order of CLASSES."""
        return np.exp(-np.asarray(self.log_efficiency, dtype=np.float64))

    @property
    def sigma(self) -> Work:
        """Standard deviations of the log efficiencies."""
        return np.sqrt(np.asarray(self.variance, dtype=np.float64))

    def efficiency(self, op_class: OpClass) -> float:
        """Return the efficiency of a class, in (0, 1]."""
        return math.exp(self.log_efficiency[CLASSES.index(op_class)])

    def factor(self, stage: ModelStage) -> float:
        """Return the factor by which a stage takes longer than its classes explain."""
        return math.exp(self.stage_log_factor.get(stage, 0.0))

    def seconds(self, stage: ModelStage, work: Work) -> float:
        """Predict the seconds of a stage."""
        return float(work @ self.inverse) * self.factor(stage)

    def refined(self, measured: Mapping[ModelStage, tuple[Work, float]]) -> Self:
        """Learn from measured stage seconds; stages without positive seconds are left out."""
        log_inverse = -np.asarray(self.log_efficiency)
        covariance = np.diag(np.asarray(self.variance) + _DRIFT * _NOISE_SIGMA)
        factors = dict(self.stage_log_factor)
        usable = {s: (w, t) for s, (w, t) in measured.items() if t > 0 and w.sum() > 0}
        for stage, (work, seconds) in sorted(usable.items(), key=lambda item: str(item[0])):
            parts = work * np.exp(log_inverse)
            predicted = float(parts.sum()) * math.exp(factors.get(stage, 0.0))
            innovation = float(np.clip(math.log(seconds / predicted), -_CLIP, _CLIP))
            share = parts / parts.sum()  # d log seconds / d log inverse efficiency
            gain = covariance @ share / (share @ covariance @ share + _NOISE_SIGMA**2)
            log_inverse = np.clip(log_inverse + gain * innovation, 0.0, -_FLOOR)
            covariance = covariance - np.outer(gain, share @ covariance)
        for stage, (work, seconds) in usable.items():
            rest = math.log(seconds / float(work @ np.exp(log_inverse)))
            held = factors.get(stage, 0.0)
            factors[stage] = held + _STAGE_RATE * (rest - held)
        return replace(
            self,
            log_efficiency=tuple(float(v) for v in -log_inverse),
            variance=tuple(float(max(v, 1e-6)) for v in np.diag(covariance)),
            stage_log_factor=MappingProxyType(factors),
            observations=self.observations + 1,
        )
