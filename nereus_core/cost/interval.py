"""Interval: predicted seconds and the bounds that hold with a stated confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self


@dataclass(frozen=True, slots=True)
class Interval:
    """A prediction in seconds; ``low_s <= mean_s <= high_s``."""

    mean_s: float
    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        if not self.low_s <= self.mean_s <= self.high_s:
            raise ValueError(f"bounds out of order: {self.low_s}, {self.mean_s}, {self.high_s}")

    def __str__(self) -> str:
        return f"{self.mean_s:.3g} s ({self.low_s:.3g} to {self.high_s:.3g})"

    @classmethod
    def exactly(cls, seconds: float) -> Self:
        """A prediction without uncertainty."""
        return cls(seconds, seconds, seconds)

    @classmethod
    def relative(cls, mean_s: float, log_deviation: float, confidence: float) -> Self:
        """Bounds that are factors of the mean: for seconds, whose errors are relative.

        Args:
            mean_s: predicted seconds.
            log_deviation: standard deviation of the logarithm of the seconds.
            confidence: probability that each bound, taken alone, holds.
        """
        factor = math.exp(_deviations(confidence) * log_deviation)
        return cls(mean_s, mean_s / factor, mean_s * factor)

    @classmethod
    def absolute(cls, mean_s: float, deviation_s: float, confidence: float) -> Self:
        """Bounds at equal distance: for a difference of seconds, which may be negative."""
        width = _deviations(confidence) * deviation_s
        return cls(mean_s, mean_s - width, mean_s + width)


def _deviations(confidence: float) -> float:
    """Standard deviations that a one-sided bound lies from the mean of a normal variable."""
    return max(0.0, NormalDist().inv_cdf(confidence))
