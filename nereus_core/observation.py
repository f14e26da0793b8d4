"""Observation: what a job tells the controller about one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nereus_core.cluster import Device
from nereus_core.workload import ModelStage

QUANTILE_LEVELS = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 1.0)
"""Parts of the sequences that are no longer than `TokenStats.quantiles`; closer in the tail, which
decides when generation ends."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """A distribution of token counts, small enough to keep for every step."""

    mean: float
    p50: float
    p95: float
    max: int
    count: int
    quantiles: tuple[float, ...] = ()
    """Tokens at `QUANTILE_LEVELS`; empty where the job reports no more than the figures above."""

    @classmethod
    def of(cls, counts: list[int] | tuple[int, ...]) -> TokenStats:
        """Summarise; an empty list gives zeros.

        >>> TokenStats.of([1, 2, 3]).mean
        2.0
        """
        if not counts:
            return cls(0.0, 0.0, 0.0, 0, 0)
        values = np.asarray(counts, dtype=np.float64)
        p50, p95 = np.percentile(values, [50, 95])
        quantiles = tuple(np.quantile(values, QUANTILE_LEVELS).tolist())
        return cls(
            float(values.mean()), float(p50), float(p95), int(values.max()), len(counts), quantiles
        )


def clip_ratio(counts: Sequence[int], limit: int) -> float | None:
    """Part of the responses that are as long as allowed, so perhaps cut off; None without any.

    >>> clip_ratio([3, 8, 8, 5], 8)
    0.5
    """
    return sum(n >= limit for n in counts) / len(counts) if counts else None


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen since the last call; all of it from the job's own clocks and counters."""

    step: int
    """Last completed RL step, from 0; -1 before the first."""
    step_s: float
    """Wall seconds of that step, transitions excluded."""
    stage_s: Mapping[ModelStage, float]
    """Wall seconds of each model-stage in that step."""
    prompt_tokens: TokenStats
    response_tokens: TokenStats
    peak_bytes: Mapping[Device, int]
    healthy: frozenset[Device]
    draining: frozenset[Device] = field(default_factory=frozenset)
    """Healthy devices announced to leave soon (spot notices): no plan uses them."""
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """Achieved / peak in (0, 1] per operation class, where the backend measures it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The job's own figures (loss, reward, ...), for the report."""
    clip_ratio: float | None = None
    """Part of the responses that reached the longest length allowed; None where not known."""
