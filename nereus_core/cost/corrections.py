"""What is learned beside efficiencies: time between stages, and how primitives really go."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

_REMEMBERED_STEPS = 5
"""Steps whose median is taken for what happens between stages; chosen, not measured."""
_TRANSITION_DEVIATION = 0.7
"""Of the log of measured / predicted primitive seconds before any is seen; chosen."""
_TRANSITION_NOISE = 0.3
"""The same from one primitive to the next; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Between:
    """What a step takes beside its stages, learned from the steps seen last."""

    overhead_s: tuple[float, ...] = ()
    """Seconds between stages: data, rewards, bookkeeping."""
    sync: tuple[float, ...] = ()
    """Measured / predicted weight synchronization, at most 1 (predictions are upper bounds)."""

    @property
    def seconds(self) -> float:
        """Overhead of a step; 0 until one is seen."""
        return statistics.median(self.overhead_s or (0.0,))

    @property
    def sync_factor(self) -> float:
        """Part of the predicted synchronization that takes place; 1 until a step is seen."""
        return statistics.median(self.sync or (1.0,))

    def seen(self, extra_s: float, sync_s: float) -> Between:
        """Take in a step that took so much longer than its stages, and its predicted syncs."""
        factor = min(1.0, max(0.0, extra_s) / sync_s) if sync_s > 0 else 1.0
        overhead_s = max(0.0, extra_s - sync_s)
        return Between(
            (*self.overhead_s, overhead_s)[-_REMEMBERED_STEPS:],
            (*self.sync, factor)[-_REMEMBERED_STEPS:],
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Measured / predicted seconds of primitives, in logs, with its variance."""

    log: float = 0.0
    variance: float = _TRANSITION_DEVIATION**2

    def seen(self, predicted_s: float, measured_s: float) -> Scale:
        """Take in one primitive; outliers beyond two deviations pull no harder."""
        spread = math.sqrt(self.variance + _TRANSITION_NOISE**2)
        surprise = math.log(measured_s / predicted_s)
        gain = self.variance / spread**2
        moved = self.log + gain * max(-2 * spread, min(2 * spread, surprise))
        # Never surer than a tenth of one primitive's scatter: machines change.
        variance = max(self.variance * (1 - gain), _TRANSITION_NOISE**2 / 10)
        return Scale(moved, variance)
