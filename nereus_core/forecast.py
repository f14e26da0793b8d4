"""Forecaster: when will a signal that wakes the planner cross its threshold again?

A saving of a plan repeats every step until the plan has to be given up: until mean response tokens
have changed by the threshold, or devices leave. That is the horizon over which a transition has to
pay back. Devices that come end nothing: the planner is woken, but what runs goes on saving, and a
still better plan has to repay a transition of its own.

The answer is a survival function, the probability that nothing has crossed after t steps:

* lengths: a robust line through a window, whose slope has a standard error, plus a random walk of
  the level whose variance is read from the window; crossed when the predicted change is larger than
  the threshold;
* devices of the plan: losses come as a Poisson process of unknown rate. Its posterior is a Gamma
  distribution (`_PRIOR_LOSSES` + losses seen, steps watched), so the time to the next loss is
  Lomax distributed: a supply that was quiet for long is expected to stay quiet for long, and one
  that has only just been met is not;
* the job: no saving outlives its last step.

Expected steps are the sum of the survival function, which is what a saving per step is multiplied
with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from nereus_core.observation import Observation

_WINDOWS = (64, 32, 16, 8)
"""Steps a trend may be read from; the longest that still describes the newest steps. Chosen."""
_NEWEST = 8
"""Steps that a window has to describe: a change of level is soon forgotten. Chosen."""
_FEWEST = 4
"""Steps below which there is no trend to speak of."""
_CHI_MEDIAN = 0.455
"""Median of the square of a standard normal variable."""
_PRIOR_LOSSES = 0.5
"""Jeffreys' prior of a Poisson rate, Gamma(1/2, 0)."""
_PRIOR_STEPS = 1.0
"""Keeps the posterior proper before the first step; the least that can have been watched."""

Array = NDArray[np.float64]
Signal = Literal["tokens", "devices", "end", "none"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The next time a trigger fires, in steps from now."""

    steps: float
    """Expected, and at most the cap that was asked for."""
    low_steps: float
    """Nothing fires before this with the confidence asked for."""
    high_steps: float
    """Something fires, or the cap is reached, before this with the same confidence."""
    signal: Signal
    """What is most likely to fire; ``end``: the job ends first; ``none``: the cap applies."""

    @classmethod
    def certain(cls, steps: float, signal: Signal) -> Self:
        """A crossing without uncertainty."""
        return cls(steps, steps, steps, signal)


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through recent mean lengths."""

    level: float
    """Tokens now."""
    slope: float
    """Tokens per step."""
    slope_deviation: float
    walk_variance: float
    """Variance that the level gains per step beside the slope."""
    steps: int
    """Length of the window it was read from."""


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Immutable; `seen` returns a new one."""

    tokens: tuple[tuple[int, float], ...] = ()
    """(step, mean response tokens) of the steps seen last."""
    first_step: int | None = None
    last_step: int | None = None
    losses: int = 0
    """Boundaries at which devices of the plan had left, or were announced to leave."""

    def seen(self, observation: Observation) -> Forecaster:
        """Take in an observation; a step seen again replaces what was seen of it."""
        tokens = self.tokens
        if observation.response_tokens.count:
            kept = tuple(t for t in tokens if t[0] < observation.step)
            newest = (observation.step, observation.response_tokens.mean)
            tokens = (*kept, newest)[-_WINDOWS[0] :]
        first = observation.step if self.first_step is None else self.first_step
        return replace(
            self,
            tokens=tokens,
            first_step=first,
            last_step=max(observation.step, self.last_step or first),
        )

    def lost(self) -> Forecaster:
        """Devices that the plan used have left, or are about to.

        Those that it did not use end no saving, whoever took them.
        """
        return replace(self, losses=self.losses + 1)

    @property
    def num_steps(self) -> int:
        """Steps over which devices were watched."""
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1

    def trend(self) -> Trend | None:
        """Read the trend of mean response tokens; None before there is one."""
        if len(self.tokens) < _FEWEST:
            return None
        step, mean = (
            np.array(column, dtype=np.float64) for column in zip(*self.tokens, strict=True)
        )
        newest = _Line.through(step[-_NEWEST:], mean[-_NEWEST:])
        windows = (w for w in _WINDOWS if _NEWEST < w <= len(step))
        lines = (_Line.through(step[-w:], mean[-w:]) for w in windows)
        return next((line for line in lines if line.describes(newest)), newest).trend()

    def steps_to_crossing(
        self,
        threshold_relative: float,
        max_steps: int,
        *,
        remaining_steps: int | None = None,
        confidence: float = 0.9,
    ) -> Crossing:
        """Forecast the next crossing, were a decision taken now.

        Args:
            threshold_relative: relative change of mean response tokens that wakes the planner.
            max_steps: longest horizon to assume.
            remaining_steps: steps that the job has left, where it has said so.
            confidence: with which each bound, taken alone, holds.
        """
        ends = remaining_steps is not None and remaining_steps <= max_steps
        cap = max(0, remaining_steps) if ends and remaining_steps is not None else max_steps
        t = np.arange(cap, dtype=np.float64)
        tokens, devices = self._tokens_survive(t, threshold_relative), self._devices_survive(t)
        alive = tokens * devices
        low = int((alive >= confidence).sum())
        high = int((alive > 1 - confidence).sum())
        if not cap or alive[-1] >= 0.5:
            signal: Signal = "end" if ends else "none"
        else:
            middle = int((alive >= 0.5).sum())
            at = min(middle, cap - 1)
            signal = "tokens" if tokens[at] <= devices[at] else "devices"
        return Crossing(float(alive.sum()), float(low), float(high), signal)

    def _tokens_survive(self, t: Array, threshold: float) -> Array:
        """Probability that mean tokens are still within the threshold after t steps."""
        trend = self.trend()
        if trend is None:
            return np.ones_like(t)
        limit, moved = threshold * trend.level, trend.slope * t
        deviation = np.sqrt((trend.slope_deviation * t) ** 2 + trend.walk_variance * t)
        with np.errstate(divide="ignore", invalid="ignore"):
            above, below = (limit - moved) / deviation, (-limit - moved) / deviation
        certain = deviation == 0
        inside = np.where(certain, np.abs(moved) < limit, _normal(above) - _normal(below))
        inside[:1] = 1.0  # now, nothing has moved
        # What has crossed stays crossed: the planner was woken.
        return np.asarray(np.minimum.accumulate(inside))

    def _devices_survive(self, t: Array) -> Array:
        """Lomax: the rate of losses is Gamma distributed given those seen."""
        shape = _PRIOR_LOSSES + self.losses
        watched = _PRIOR_STEPS + self.num_steps
        return np.asarray((watched / (watched + t)) ** shape)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line by the median of slopes (Theil-Sen); outliers do not turn it.

    Source: Sen (1968), "Estimates of the Regression Coefficient Based on Kendall's Tau".
    """

    level: float
    slope: float
    residual: Array
    noise: float
    """Standard deviation of residuals: 1.4826 x the median of their sizes, as if normal."""
    spread: float
    """Root of the summed squares of steps around their mean."""

    @classmethod
    def through(cls, step: Array, mean: Array) -> Self:
        i, j = np.triu_indices(len(step), 1)
        slope = float(np.median((mean[j] - mean[i]) / (step[j] - step[i])))
        flat = mean - slope * (step - step[-1])
        level = float(np.median(flat))
        noise = 1.4826 * float(np.median(np.abs(flat - level)))
        spread = float(np.sqrt(((step - step.mean()) ** 2).sum()))
        return cls(level, slope, flat - level, noise, spread)

    def describes(self, newest: _Line) -> bool:
        """Whether the newest steps lie around this line as closely as around their own."""
        middle = abs(float(np.median(self.residual[-_NEWEST:])))
        # The median of n normal variables deviates by 1.2533 / sqrt(n).
        return middle <= 2 * 1.2533 * newest.noise / math.sqrt(_NEWEST) + 1e-9 * self.level

    def trend(self) -> Trend:
        """Read slope, level and how far both may be off."""
        number, walk = len(self.residual), 0.0
        if number >= 2 * _NEWEST:
            # Of a walk seen through noise, squared differences grow with their lag: 2 r + lag q.
            lag = _NEWEST // 2
            grown = _moved(self.residual, lag) - _moved(self.residual, 1)
            walk = max(0.0, grown / (lag - 1)) / _CHI_MEDIAN
        # A walk shifts the slope of a window too: its drift is known to sqrt(q / n) only.
        deviation = math.hypot(self.noise / self.spread, math.sqrt(walk / number))
        return Trend(self.level, self.slope, deviation, walk, number)


def _moved(values: Array, lag: int) -> float:
    """Median squared difference over a lag."""
    return float(np.median((values[lag:] - values[:-lag]) ** 2))


def _normal(deviations: Array) -> Array:
    """Probability that a standard normal variable is smaller."""
    return np.array([0.5 * math.erfc(-d / math.sqrt(2)) for d in deviations])
