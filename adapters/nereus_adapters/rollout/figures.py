"""Figures of a step: what whoever steps a job says of it, and engines' signals as metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nereus_adapters.rollout.ports import EngineSignals
from nereus_core.cluster import Device
from nereus_core.observation import Observation, TokenStats, clip_ratio
from nereus_core.units import UnitId
from nereus_core.workload import Job, ModelStage


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What whoever steps the job says of one step."""

    step_s: float
    stage_s: Mapping[ModelStage, float]
    metrics: Mapping[str, float] = field(default_factory=dict)


def figures_of(signals: Mapping[UnitId, EngineSignals]) -> dict[str, float]:
    """Write engines' signals as metrics of a job, ``unit/signal``."""
    found: dict[str, float] = {}
    for unit, seen in signals.items():
        found |= {
            f"{unit}/kv_cache_use": seen.kv_cache_use,
            f"{unit}/preemptions": float(seen.preemptions),
            f"{unit}/running": float(seen.running),
            f"{unit}/waiting": float(seen.waiting),
            f"{unit}/tokens_per_s": seen.tokens_per_s,
            f"{unit}/peak_bytes": float(max(seen.peak_bytes.values(), default=0)),
        }
        if seen.first_token_s is not None:
            found[f"{unit}/first_token_s"] = seen.first_token_s
    return found


def with_engines(
    peaks: Mapping[Device, int], signals: Mapping[UnitId, EngineSignals]
) -> dict[Device, int]:
    """Return peaks of other stages with those of engines added: devices hold both."""
    found = dict(peaks)
    for seen in signals.values():
        for device, peak in seen.peak_bytes.items():
            found[device] = found.get(device, 0) + peak
    return found


class Seen:
    """What was seen of a job since it was last asked for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: StepFigures | None = None
        self._lengths: list[tuple[int, int]] = []
        self._signals: Mapping[UnitId, EngineSignals] = {}

    def note(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Keep the tokens of prompts and their responses."""
        with self._lock:
            self._lengths += lengths

    def stepped(self, figures: StepFigures, signals: Mapping[UnitId, EngineSignals]) -> None:
        """Keep the figures of a step."""
        with self._lock:
            self._figures, self._signals = figures, signals

    def take(self, step: int, job: Job, peaks: Mapping[Device, int], longest: int) -> Observation:
        """Return what was seen, and forget it.

        Args:
            step: the last one.
            job: on the cluster as it is now.
            peaks: of other stages.
            longest: most tokens of a response.
        """
        with self._lock:
            figures, self._figures = self._figures, None
            lengths, self._lengths = self._lengths, []
            signals, self._signals = self._signals, {}
        responses = [n for _, n in lengths]
        return Observation(
            step=step,
            step_s=figures.step_s if figures else 0.0,
            stage_s=dict(figures.stage_s) if figures else {},
            prompt_tokens=TokenStats.of([n for n, _ in lengths]),
            response_tokens=TokenStats.of(responses),
            peak_bytes=with_engines(peaks, signals),
            healthy=frozenset(job.cluster.healthy),
            metrics={**(figures.metrics if figures else {}), **figures_of(signals)},
            clip_ratio=clip_ratio(responses, longest),
        )
