"""What wakes the controller, and what keeps it from waking at every step.

Every signal has a threshold, and is measured from where it stood at the last decision: it wakes
once and then has to move again. A signal that swings within `quiet_amplitude` never wakes twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from nereus_core.cluster import Device
from nereus_core.config import PolicyConfig
from nereus_core.observation import Observation
from nereus_core.workload import ModelStage

PATIENCE_STEPS = 2
"""Steps in a row that a noisy signal must be off; one odd step is noise. Chosen."""
_MEMORY_RELEASE = 0.95
"""Part of the allowed memory below which a tight device counts as relaxed again. Chosen."""


class Trigger(StrEnum):
    """Why the controller thinks."""

    DEVICES = "devices"
    """Devices were lost, returned or announced to leave."""
    MEMORY = "memory"
    """A measured peak entered the headroom, or the plan is predicted not to fit."""
    TOKENS = "tokens"
    """Response tokens moved away from those of the last decision: mean, tail or clip ratio."""
    EFFICIENCY = "efficiency"
    """Step latency was off its prediction, or an achieved efficiency moved, for some steps."""
    BALANCE = "balance"
    """The share of a step that each stage takes moved: the bottleneck is another one."""
    RECHECK = "recheck"
    """A plan has now been seen running, or a refusal is looked at again."""


@dataclass(frozen=True, slots=True)
class Wake:
    """A trigger with the values that fired it."""

    trigger: Trigger
    why: str
    """In words, with values and the threshold."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What one boundary saw. None, or an empty mapping, where nothing was measured."""

    devices: str | None
    """How the devices that plans may use changed, in words; None when they did not, and when only
    some that the plan does not use have left."""
    memory_problem: str | None
    """Why the current plan is predicted not to fit."""
    peak_bytes: Mapping[Device, int]
    capacity_bytes: int
    tokens_mean: float | None
    """Mean response tokens; None when no step was completed since the last boundary."""
    tokens_p95: float | None = None
    clip_ratio: float | None = None
    step_s: float = 0.0
    predicted_s: float | None = None
    """As predicted before the step, by a model that had seen the current plan run."""
    stage_s: Mapping[ModelStage, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        seen: Observation,
        *,
        stepped: bool,
        devices: str | None,
        memory_problem: str | None,
        capacity_bytes: int,
        predicted_s: float | None,
    ) -> Self:
        """Read an observation; of a boundary without a new step, devices and memory alone."""
        alone = cls(devices, memory_problem, seen.peak_bytes, capacity_bytes, None)
        if not stepped or not seen.response_tokens.count:
            return alone
        return replace(
            alone,
            tokens_mean=seen.response_tokens.mean,
            tokens_p95=seen.response_tokens.p95,
            clip_ratio=seen.clip_ratio,
            step_s=seen.step_s,
            predicted_s=predicted_s,
            stage_s=seen.stage_s,
            efficiency=seen.efficiency,
        )

    @property
    def shares(self) -> Mapping[ModelStage, float]:
        """Part of all stage seconds that each stage took."""
        total = sum(self.stage_s.values())
        return {s: t / total for s, t in self.stage_s.items()} if total > 0 else {}


@dataclass(frozen=True, slots=True)
class Levels:
    """Where the signals stood at the last decision; None or absent where not yet measured."""

    tokens_mean: float
    tokens_p95: float | None = None
    clip_ratio: float | None = None
    shares: Mapping[ModelStage, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)

    def filled(self, now: Signals) -> Levels:
        """Take what was never measured before from what is measured now."""
        return replace(
            self,
            tokens_p95=now.tokens_p95 if self.tokens_p95 is None else self.tokens_p95,
            clip_ratio=now.clip_ratio if self.clip_ratio is None else self.clip_ratio,
            shares=self.shares or now.shares,
            efficiency={**now.efficiency, **self.efficiency},
        )


def quiet_amplitude(threshold: float) -> float:
    """Relative amplitude up to which a signal may swing around a level and wake nobody again.

    The reference may lie at one end of the swing and the next value at the other:
    ``(1 + a) - (1 - a) <= threshold * (1 - a)``.

    >>> quiet_amplitude(0.25)
    0.1111111111111111
    """
    return threshold / (2 + threshold)


@dataclass(frozen=True, slots=True)
class Triggers:
    """Thresholds with memory. Immutable."""

    policy: PolicyConfig
    levels: Levels
    newest: Signals | None = None
    """Of the last completed step."""
    memory_tight: bool = False
    """Whether the last boundary saw, or predicted, a peak inside the headroom."""
    off: Mapping[Trigger, int] = field(default_factory=dict)
    """Steps in a row that each noisy signal was off."""

    def seen(self, signals: Signals) -> tuple[Self, Wake | None]:
        """Take in one boundary; return what woke, the gravest first."""
        tight = self._tight(signals)
        stepped = signals.tokens_mean is not None
        levels = self.levels.filled(signals) if stepped else self.levels
        now = replace(self, levels=levels, memory_tight=tight is not None)
        noisy: list[tuple[Trigger, str | None]] = []
        if stepped:
            noisy = [
                (Trigger.TOKENS, now._tail_moved(signals)),
                (Trigger.EFFICIENCY, now._off_prediction(signals) or now._class_moved(signals)),
                (Trigger.BALANCE, now._balance_moved(signals)),
            ]
            off = {t: self.off.get(t, 0) + 1 for t, why in noisy if why}
            now = replace(now, newest=signals, off=off)
        if signals.devices:
            return now, Wake(Trigger.DEVICES, signals.devices)
        if tight and not self.memory_tight:
            return now, Wake(Trigger.MEMORY, tight)
        if moved := now._mean_moved(signals):
            return now, Wake(Trigger.TOKENS, moved)
        for trigger, why in noisy:
            if why and now.off[trigger] >= PATIENCE_STEPS:
                return now, Wake(trigger, f"{why}, {now.off[trigger]} steps in a row")
        return now, None

    def decided(self, tokens_mean: float) -> Self:
        """Measure changes from here on."""
        levels = Levels(tokens_mean)
        return replace(self, levels=levels.filled(self.newest) if self.newest else levels, off={})

    def changed(self) -> Self:
        """Another plan runs: what depends on the plan is measured anew."""
        return replace(self, levels=replace(self.levels, shares={}, efficiency={}), newest=None)

    def _tight(self, signals: Signals) -> str | None:
        if signals.memory_problem is not None:
            return signals.memory_problem
        limit = signals.capacity_bytes * (1 - self.policy.memory_headroom)
        limit *= _MEMORY_RELEASE if self.memory_tight else 1.0
        peak, device = max(((b, d) for d, b in signals.peak_bytes.items()), default=(0, None))
        if peak <= limit:
            return None
        return (
            f"{device} peaked at {peak / 2**30:.2f} GiB of {signals.capacity_bytes / 2**30:.2f}, "
            f"inside the headroom of {self.policy.memory_headroom:.0%}"
        )

    def _mean_moved(self, signals: Signals) -> str | None:
        if signals.tokens_mean is None:
            return None
        return self._moved("mean response tokens", self.levels.tokens_mean, signals.tokens_mean)

    def _tail_moved(self, signals: Signals) -> str | None:
        before, now = self.levels.tokens_p95, signals.tokens_p95
        if before and now and (why := self._moved("95th percentile of tokens", before, now)):
            return why
        clip, was = signals.clip_ratio, self.levels.clip_ratio
        if clip is None or was is None or abs(clip - was) <= self.policy.clip_change:
            return None
        return (
            f"clipped responses {was:.1%} -> {clip:.1%} "
            f"(threshold {self.policy.clip_change:.0%} of all)"
        )

    def _moved(self, what: str, before: float, now: float) -> str | None:
        if abs(now - before) <= self.policy.tokens_change * before:
            return None
        return (
            f"{what} {before:.4g} -> {now:.4g} ({now / before - 1:+.0%}, "
            f"threshold {self.policy.tokens_change:.0%})"
        )

    def _off_prediction(self, signals: Signals) -> str | None:
        if not signals.predicted_s or signals.step_s <= 0:
            return None
        gap = signals.step_s / signals.predicted_s - 1
        if abs(gap) <= self.policy.efficiency_change:
            return None
        return (
            f"a step took {signals.step_s:.3g} s, predicted {signals.predicted_s:.3g} s "
            f"({gap:+.0%}, threshold {self.policy.efficiency_change:.0%})"
        )

    def _class_moved(self, signals: Signals) -> str | None:
        for name, now in signals.efficiency.items():
            before = self.levels.efficiency[name]
            if abs(now - before) > self.policy.efficiency_change * before:
                return (
                    f"achieved efficiency of {name} {before:.2f} -> {now:.2f} "
                    f"(threshold {self.policy.efficiency_change:.0%})"
                )
        return None

    def _balance_moved(self, signals: Signals) -> str | None:
        before, now = self.levels.shares, signals.shares
        if not before or not now:
            return None
        stages = sorted({*before, *now})
        moved = {s: now.get(s, 0.0) - before.get(s, 0.0) for s in stages}
        # Total variation: the part of a step that went from some stages to others.
        if sum(map(abs, moved.values())) / 2 <= self.policy.balance_change:
            return None
        most = max(stages, key=lambda s: moved[s])
        return (
            f"{most} takes {now.get(most, 0.0):.0%} of the stages' seconds, was "
            f"{before.get(most, 0.0):.0%} (threshold {self.policy.balance_change:.0%} moved)"
        )
