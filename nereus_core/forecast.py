"""Forecast: when does a triggering signal next cross its threshold?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from nereus_core.observation import Observation

_WINDOW = 32  # steps that a trend is read from; chosen, not measured


@dataclass(frozen=True, slots=True)
class Crossing:
    """Steps until the next crossing: expected, and a lower bound for careful payback."""

    steps: float
    low_steps: float
    signal: str


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Remembers what decides: response lengths, and when devices last changed."""

    tokens: tuple[float, ...] = ()
    healthy: int | None = None
    changes: tuple[int, ...] = ()
    """Steps at which the number of healthy devices changed."""
    first_step: int = 0
    step: int = 0

    def seen(self, observation: Observation) -> Self:
        """Take in one step."""
        num_healthy = len(observation.healthy)
        changed = self.healthy is not None and num_healthy != self.healthy
        return replace(
            self,
            tokens=(*self.tokens, observation.response_tokens.mean)[-_WINDOW:],
            healthy=num_healthy,
            changes=(*self.changes, observation.step)[-_WINDOW:] if changed else self.changes,
            first_step=observation.step if self.healthy is None else self.first_step,
            step=observation.step,
        )

    def steps_to_crossing(self, threshold_relative: float, max_steps: int) -> Crossing:
        """Predict from now: the earlier of the length trend and the supply of devices.

        The trend is Theil and Sen's (median of pairwise slopes), its lower bound uses the upper
        quartile of the slopes. Supply: the mean distance of changes so far.
        """
        found = [self._by_tokens(threshold_relative, max_steps), self._by_devices(max_steps)]
        return min(found, key=lambda c: (c.low_steps, c.steps))

    def _by_tokens(self, threshold_relative: float, max_steps: int) -> Crossing:
        if len(self.tokens) < 3 or self.tokens[-1] <= 0:
            return Crossing(float(max_steps), float(max_steps), "none")
        values = np.asarray(self.tokens)
        i, j = np.triu_indices(len(values), k=1)
        slopes = (values[j] - values[i]) / (j - i)
        room = threshold_relative * values[-1]
        median, quartile = np.median(np.abs(slopes)), np.percentile(np.abs(slopes), 75)
        trend = abs(float(np.median(slopes)))
        steps = min(float(max_steps), room / trend if trend > 0 else float(max_steps))
        hurried = max(trend, min(float(quartile), float(median)) if trend > 0 else 0.0)
        low = min(steps, room / hurried if hurried > 0 else float(max_steps))
        return Crossing(max(1.0, steps), max(1.0, low), "tokens")

    def _by_devices(self, max_steps: int) -> Crossing:
        if not self.changes:
            return Crossing(float(max_steps), float(max_steps), "none")
        spell = max(1.0, (self.step - self.first_step + 1) / len(self.changes))
        steps = min(float(max_steps), spell)
        return Crossing(steps, max(1.0, steps / 2), "devices")
