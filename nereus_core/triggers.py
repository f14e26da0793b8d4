"""What wakes the controller, and what keeps it from waking at every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from nereus_core.cluster import Device
from nereus_core.config import PolicyConfig

PATIENCE_STEPS = 2
"""Steps in a row that latency must be off its prediction; one slow step is noise. Chosen."""


class Trigger(StrEnum):
    """Why the controller thinks."""

    DEVICES = "devices"
    """Devices were lost, returned or announced to leave."""
    MEMORY = "memory"
    """A measured peak entered the headroom, or the plan is predicted not to fit."""
    TOKENS = "tokens"
    """Mean response tokens moved away from those of the last decision."""
    EFFICIENCY = "efficiency"
    """Step latency was off its prediction for some steps in a row."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What one boundary saw."""

    devices_changed: bool
    memory_problem: str | None
    """Why the current plan is predicted not to fit."""
    peak_bytes: Mapping[Device, int]
    capacity_bytes: int
    response_tokens_mean: float | None
    """None when no step was completed since the last boundary."""
    step_s: float
    predicted_s: float | None
    """As predicted before the step, by a model that had seen the current plan run."""


@dataclass(frozen=True, slots=True)
class Triggers:
    """Thresholds with memory: each signal wakes once, then has to move again. Immutable."""

    policy: PolicyConfig
    tokens_mean: float
    """Mean response tokens at the last decision."""
    memory_tight: bool = False
    """Whether the last boundary saw, or predicted, a peak inside the headroom."""
    steps_off: int = 0
    """Steps in a row whose latency was off."""

    def seen(self, signals: Signals) -> tuple[Self, Trigger | None]:
        """Take in one boundary; return what woke, the gravest first."""
        tight = self._tight(signals)
        off = self.steps_off + 1 if self._off(signals) else 0
        found: Trigger | None = None
        if signals.devices_changed:
            found = Trigger.DEVICES
        elif tight and not self.memory_tight:
            found = Trigger.MEMORY
        elif self._moved(signals):
            found = Trigger.TOKENS
        elif off >= PATIENCE_STEPS:
            found = Trigger.EFFICIENCY
        return replace(self, memory_tight=tight, steps_off=off), found

    def decided(self, tokens_mean: float) -> Self:
        """Measure changes from here on."""
        return replace(self, tokens_mean=tokens_mean, steps_off=0)

    def _tight(self, signals: Signals) -> bool:
        allowed = signals.capacity_bytes * (1 - self.policy.memory_headroom)
        peak = max(signals.peak_bytes.values(), default=0)
        return signals.memory_problem is not None or peak > allowed

    def _moved(self, signals: Signals) -> bool:
        now = signals.response_tokens_mean
        if now is None:
            return False
        return abs(now - self.tokens_mean) > self.policy.tokens_change * self.tokens_mean

    def _off(self, signals: Signals) -> bool:
        if signals.response_tokens_mean is None or not signals.predicted_s:
            return False
        gap = abs(signals.step_s - signals.predicted_s) / signals.predicted_s
        return gap > self.policy.efficiency_change
