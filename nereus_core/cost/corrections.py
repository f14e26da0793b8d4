"""What is learned beside efficiencies: the time between stages."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

_REMEMBERED_STEPS = 5
"""Steps whose median is taken for what happens between stages; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Between:
    """What a step takes beside its stages, learned from the steps seen last."""

    overhead_s: tuple[float, ...] = ()
    """Seconds between stages: data, rewards, bookkeeping."""
    sync: tuple[float, ...] = ()
    """Measured / predicted weight synchronization, at most 1 (predictions are upper bounds)."""

    @property
    def seconds(self) -> float:
        """Overhead of a step; 0 until one is seen."""
        return statistics.median(self.overhead_s or (0.0,))

    @property
    def sync_factor(self) -> float:
        """Part of the predicted synchronization that takes place; 1 until a step is seen."""
        return statistics.median(self.sync or (1.0,))

    def seen(self, extra_s: float, sync_s: float) -> Between:
        """Take in a step that took so much longer than its stages, and its predicted syncs."""
        factor = min(1.0, max(0.0, extra_s) / sync_s) if sync_s > 0 else 1.0
        overhead_s = max(0.0, extra_s - sync_s)
        return Between(
            (*self.overhead_s, overhead_s)[-_REMEMBERED_STEPS:],
            (*self.sync, factor)[-_REMEMBERED_STEPS:],
        )
