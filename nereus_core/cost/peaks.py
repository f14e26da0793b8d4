"""Peaks: how much memory stages really take while they run, learned from measured peaks.

What stays between steps is exact arithmetic; what running needs depends on kernels, allocators and
how well a cache fills. A device's peak is what stays there and the largest need among the stages
that meet on it, so a measured peak corrects that stage. Corrections are bounded. A need is lowered
no further than to its upper bound and raised to what is expected: a plan that ran is not called
infeasible for ever, one that needs more than predicted is caught, and a peak that confirms its
prediction changes nothing. How peaks scatter around what is expected is what the headroom is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nereus_core.workload import ModelStage

_PRIOR_VARIANCE = 0.3**2
"""Of log(measured / predicted) before a peak is seen: a factor 1.35; chosen, not measured."""
_NOISE_VARIANCE = 0.1**2
"""Of one measured peak: allocators differ from step to step; chosen, not measured."""
_LIMIT = math.log(4.0)
"""Corrections stay within a factor of four either way; chosen, not measured."""
_BOUND_DEVIATIONS = 1.28
"""A correction's upper bound holds with 90%."""
_GRID = 0.05
"""Factors are rounded up to steps of five percent, so that a settled one does not wander."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Logs of measured / predicted bytes that a stage's running takes, with their variance."""

    seen_by: Mapping[ModelStage, tuple[float, float]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def factor(self, stage: ModelStage) -> float:
        """What is reckoned with of measured / predicted; 1 until a peak of the stage is seen."""
        if stage not in self.seen_by:
            return 1.0
        log, variance = self.seen_by[stage]
        bound = max(log, min(0.0, log + _BOUND_DEVIATIONS * math.sqrt(variance)))
        return math.exp(_GRID * math.ceil(round(bound / _GRID, 6)))

    @property
    def factors(self) -> Mapping[ModelStage, float]:
        """All factors that are not yet, or no longer, 1 by default."""
        return {stage: self.factor(stage) for stage in self.seen_by}

    def seen(self, stage: ModelStage, predicted_bytes: float, measured_bytes: float) -> Peaks:
        """Take in one peak.

        Args:
            stage: whose running made it.
            predicted_bytes: that it was to take, uncorrected.
            measured_bytes: that it took above what stays; may be zero or negative where what stays
                was overestimated, which counts as the lower limit.
        """
        if predicted_bytes <= 0:
            return self
        ratio = max(measured_bytes / predicted_bytes, math.exp(-_LIMIT))
        log, variance = self.seen_by.get(stage, (0.0, _PRIOR_VARIANCE))
        variance = min(_PRIOR_VARIANCE, variance + _NOISE_VARIANCE / 10)  # lengths and code change
        gain = variance / (variance + _NOISE_VARIANCE)
        moved = log + gain * (min(math.log(ratio), _LIMIT) - log)
        return Peaks({**self.seen_by, stage: (moved, variance * (1 - gain))})
