"""Forecaster: when will a signal that wakes the planner cross its threshold again?

A decision taken now would be looked at again once mean response tokens have changed by the
threshold, or once devices leave or come. Until then a saving repeats every step: that is the
horizon over which a transition has to pay back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from nereus_core.cluster import Device
from nereus_core.observation import Observation

_WINDOW = 32
"""Steps a trend is read from; chosen, not measured."""
_FEWEST = 4
"""Steps below which there is no trend to speak of."""
_DEVIATIONS = 1.28
"""Of the lower bound: 90% of a normal variable lies above."""
_MAD_TO_DEVIATION = 1.4826
"""Standard deviation / median absolute deviation of a normal variable."""

Signal = Literal["tokens", "devices", "none"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The next time a trigger fires, in steps from now."""

    steps: float
    """Expected."""
    low_steps: float
    """Lower bound; at least 0, at most `steps`."""
    signal: Signal
    """What is expected to fire; ``none`` when nothing is in sight and the cap applies."""


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Immutable; `seen` returns a new one."""

    tokens: tuple[tuple[int, float], ...] = ()
    """(step, mean response tokens) of the steps seen last."""
    first_step: int | None = None
    last_step: int | None = None
    supply: frozenset[Device] | None = None
    """Healthy devices that are not about to leave, when last seen."""
    supply_changes: int = 0

    def seen(self, observation: Observation) -> Forecaster:
        """Take in an observation; a step seen again replaces what was seen of it."""
        tokens = self.tokens
        if observation.response_tokens.count:
            kept = tuple(t for t in tokens if t[0] < observation.step)
            tokens = (*kept, (observation.step, observation.response_tokens.mean))[-_WINDOW:]
        supply = observation.healthy - observation.draining
        changed = self.supply is not None and supply != self.supply
        first = observation.step if self.first_step is None else self.first_step
        return replace(
            self,
            tokens=tokens,
            first_step=first,
            last_step=max(observation.step, self.last_step or first),
            supply=supply,
            supply_changes=self.supply_changes + changed,
        )

    @property
    def num_steps(self) -> int:
        """Steps over which devices were watched."""
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1

    def steps_to_crossing(self, threshold_relative: float, max_steps: int) -> Crossing:
        """Forecast the next crossing, were a decision taken now.

        Args:
            threshold_relative: relative change of mean response tokens that wakes the planner.
            max_steps: longest horizon to assume.
        """
        tokens, devices = self._tokens(threshold_relative), self._devices()
        steps = min(tokens.steps, devices.steps)
        low = min(tokens.low_steps, devices.low_steps, steps)
        signal: Signal = "tokens" if tokens.steps <= devices.steps else "devices"
        if steps >= max_steps:
            steps, signal = float(max_steps), "none"
        return Crossing(steps, min(low, steps), signal)

    def _tokens(self, threshold: float) -> Crossing:
        """A line through the window by the median of slopes (Theil-Sen): outliers do not turn it.

        Source: Sen (1968), "Estimates of the Regression Coefficient Based on Kendall's Tau".
        """
        if len(self.tokens) < _FEWEST:
            # What has gone on for n steps may be expected to go on for about n more.
            return Crossing(math.inf, float(max(1, len(self.tokens))), "tokens")
        step, mean = (np.array(column) for column in zip(*self.tokens, strict=True))
        slopes = [
            (mean[j] - mean[i]) / (step[j] - step[i]) for i, j in combinations(range(len(step)), 2)
        ]
        slope = float(np.median(slopes))
        level = float(np.median(mean - slope * (step - step[-1])))
        off = mean - level - slope * (step - step[-1])
        spread = _MAD_TO_DEVIATION * float(np.median(np.abs(off)))
        slope_error = _DEVIATIONS * spread / math.sqrt(((step - step.mean()) ** 2).sum())
        distance = threshold * level
        expected = distance / abs(slope) if slope else math.inf
        fastest = abs(slope) + slope_error  # in whichever direction
        nearest = max(0.0, distance - _DEVIATIONS * spread)  # noise may cross earlier than level
        low = nearest / fastest if fastest else math.inf
        return Crossing(expected, min(low, expected), "tokens")

    def _devices(self) -> Crossing:
        """Mean steps between the changes seen so far; the lower bound is on that mean."""
        changes = self.supply_changes
        if not changes:
            return Crossing(math.inf, math.inf, "devices")
        # Upper bound of a Poisson mean after seeing so many: n + 1 + z sqrt(n + 1).
        most = changes + 1 + _DEVIATIONS * math.sqrt(changes + 1)
        return Crossing(self.num_steps / changes, self.num_steps / most, "devices")
