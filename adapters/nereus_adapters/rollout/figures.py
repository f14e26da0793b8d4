"""Figures of a step: what whoever steps a job says of it, and engines' signals as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus_adapters.rollout.ports import EngineSignals
from nereus_core.units import UnitId
from nereus_core.workload import ModelStage


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
        }
        if seen.first_token_s is not None:
            found[f"{unit}/first_token_s"] = seen.first_token_s
    return found
