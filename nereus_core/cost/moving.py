"""Moving: how long transitions really take, learned from those that were carried out.

Seconds are the work of the primitives on the longest path, class by class, times what a class takes
of its ideal: the same form as a stage's, with unknowns of its own, because state does not travel as
activations do. All classes start from the job's efficiencies with an error that they share and one
of their own, so that one transition already corrects all, and transitions of different mixes tell
calls from bytes. How much transitions scatter is learned too, and how wide an interval must be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from nereus_core.cost.coverage import Coverage
from nereus_core.cost.interval import Interval
from nereus_core.cost.kalman import gain, shrunk
from nereus_core.cost.op_classes import CLASSES, FloatArray

_SHARED_DEVIATION = 0.7
"""Of the log of measured / predicted seconds that all classes share, before any is seen; chosen."""
_OWN_DEVIATION = 0.5
"""The same of each class beside it; chosen, not measured."""
_DRIFT_DEVIATION = 0.05
"""How far a class wanders from one transition to the next: machines change; chosen."""
_NOISE = 0.3
"""Scatter of one transition, in logs, before any is seen; chosen, not measured."""
_NOISE_WEIGHT = 2.0
"""Transitions that the scatter assumed at first counts as; chosen, not measured."""
_HUBER = 2.0
"""Deviations beyond which a transition pulls no harder; chosen, not measured."""
_ITERATIONS = 4
"""Relinearizations per transition, as in `EfficiencyTable`."""


def _unknown() -> FloatArray:
    size = len(CLASSES)
    return np.asarray(_OWN_DEVIATION**2 * np.eye(size) + _SHARED_DEVIATION**2)


@dataclass(frozen=True, slots=True, eq=False)
class Moving:
    """Immutable; `seen` returns a new one."""

    log_inverse: FloatArray
    """[num_classes]."""
    covariance: FloatArray = field(default_factory=_unknown)
    """[num_classes, num_classes]."""
    scatter: float = _NOISE_WEIGHT * _NOISE**2
    """Sum of the squares that noise is expected to have had."""
    seen_count: int = 0
    coverage: Coverage = field(default_factory=Coverage)

    @classmethod
    def unseen(cls, log_inverse: FloatArray) -> Self:
        """Start from what classes take in stages."""
        return cls(log_inverse)

    @property
    def noise(self) -> float:
        """Deviation of one transition beside what is not known, in logs."""
        return math.sqrt(self.scatter / (_NOISE_WEIGHT + self.seen_count))

    def predicted(self, work: FloatArray, confidence: float) -> Interval:
        """Predict the seconds of ideal work [num_classes]; bounds are factors of the mean."""
        log_s, jacobian = _predict(self.log_inverse, work)
        _, deviation = gain(self.covariance, jacobian, self.noise)
        width = math.exp(self.coverage.deviations(confidence) * deviation)
        seconds = math.exp(log_s)
        return Interval(seconds, seconds / width, seconds * width)

    def seen(self, work: FloatArray, measured_s: float, confidence: float) -> Moving:
        """Take in one transition; those that miss by far pull no harder than two deviations."""
        prior, noise = self.log_inverse, self.noise
        covariance = self.covariance + _DRIFT_DEVIATION**2 * np.eye(len(CLASSES))
        log_s, jacobian = _predict(prior, work)
        _, deviation = gain(covariance, jacobian, noise)
        surprise = math.log(measured_s) - log_s
        pulled = max(-_HUBER * deviation, min(_HUBER * deviation, surprise))
        state, weights = prior, np.zeros(len(prior))
        for _ in range(_ITERATIONS):
            predicted, jacobian = _predict(state, work)
            weights, _ = gain(covariance, jacobian, noise)
            state = prior + weights * (log_s + pulled - predicted - jacobian @ (prior - state))
        # Of this miss, what the unknowns leave, and how little is known of that (as EM reckons).
        left = noise**2 / deviation**2
        scatter = (left * pulled) ** 2 + noise**2 * (1 - left)
        return replace(
            self,
            log_inverse=state,
            covariance=shrunk(covariance, weights, jacobian, noise),
            scatter=self.scatter + scatter,
            seen_count=self.seen_count + 1,
            coverage=self.coverage.seen(abs(surprise) / deviation, confidence),
        )


def _predict(state: FloatArray, work: Sequence[float] | FloatArray) -> tuple[float, FloatArray]:
    """Log seconds of ideal work, and the share of each class in them."""
    seconds = np.asarray(work) * np.exp(state)
    total = float(seconds.sum())
    return math.log(total), seconds / total
