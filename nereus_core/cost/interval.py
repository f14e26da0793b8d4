"""Interval: a predicted quantity of seconds with the bounds that admission compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds: the expected value and a two-sided interval at the model's confidence."""

    mean_s: float
    low_s: float
    high_s: float

    @classmethod
    def around(cls, mean_s: float, spread_s: float) -> Self:
        """Build ``mean +- spread``; bounds may be negative, since differences are intervals too."""
        return cls(mean_s, mean_s - spread_s, mean_s + spread_s)

    def __str__(self) -> str:
        return f"{self.mean_s:.3g} s [{self.low_s:.3g}, {self.high_s:.3g}]"
