"""Coverage: how wide an interval must be to hold as often as it says, learned as steps go by.

Adaptive conformal prediction: an interval's half-width is a quantile of the misses seen so far, in
units of the deviation that the model itself stated, and the quantile's level moves a little after
every step toward the stated coverage. It needs no distribution and follows drift.

Source: Gibbs and Candes (2021), "Adaptive Conformal Inference Under Distribution Shift".
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_REMEMBERED = 100
"""Misses kept; chosen, not measured."""
_ENOUGH = 9
"""Misses from which a 90% quantile can be read at all; before, misses are taken as normal."""
_RATE = 0.03
"""How far a step moves the level; chosen, not measured."""
NOISE = 0.05
"""Deviation of one measured step beside the model's own, in logs; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Misses of one-step-ahead predictions; immutable."""

    misses: tuple[float, ...] = ()
    """|log(measured / predicted)| over the deviation stated."""
    shift: float = 0.0
    """Of the level, from the one stated."""

    def deviations(self, confidence: float) -> float:
        """Deviations from the mean to a bound that, taken alone, holds with this confidence."""
        both = 2 * confidence - 1
        if both <= 0:
            return 0.0
        if len(self.misses) < _ENOUGH:
            return NormalDist().inv_cdf(confidence)
        n = len(self.misses)
        level = min(1.0, max(0.0, (both + self.shift) * (n + 1) / n))
        return float(np.quantile(self.misses, level))

    def seen(self, miss: float, confidence: float) -> Coverage:
        """Take in a step that missed its prediction by so many stated deviations."""
        both, held = 2 * confidence - 1, miss <= self.deviations(confidence)
        shift = self.shift + (_RATE * (both - held) if len(self.misses) >= _ENOUGH else 0.0)
        room = 1 - both
        return Coverage((*self.misses, miss)[-_REMEMBERED:], min(room, max(-room, shift)))
