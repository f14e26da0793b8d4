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

_WINDOW = 8
"""Steps a trend is read from; few, so that a change of level is soon forgotten. Chosen."""
_FEWEST = 4
"""Steps below which there is no trend to speak of."""

Signal = Literal["tokens", "devices", "none"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The next time a trigger fires, in steps from now."""

    steps: float
    """Expected; at most the cap that was asked for."""
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
        steps = min(tokens, devices)
        if steps >= max_steps:
            return Crossing(float(max_steps), "none")
        return Crossing(steps, "tokens" if tokens <= devices else "devices")

    def _tokens(self, threshold: float) -> float:
        """A line through the window by the median of slopes (Theil-Sen): outliers do not turn it.

        Source: Sen (1968), "Estimates of the Regression Coefficient Based on Kendall's Tau".
        """
        if len(self.tokens) < _FEWEST:
            return math.inf
        step, mean = (np.array(column) for column in zip(*self.tokens, strict=True))
        slopes = [
            (mean[j] - mean[i]) / (step[j] - step[i]) for i, j in combinations(range(len(step)), 2)
        ]
        slope = float(np.median(slopes))
        level = float(np.median(mean - slope * (step - step[-1])))
        return threshold * level / abs(slope) if slope else math.inf

    def _devices(self) -> float:
        """Mean steps between the changes of supply seen so far."""
        return self.num_steps / self.supply_changes if self.supply_changes else math.inf
