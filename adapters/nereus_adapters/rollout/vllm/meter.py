"""Meter: what an engine's scheduler reports, between two readings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from nereus_adapters.rollout.vllm.values import Seen


class Meter(StatLoggerBase):
    """Keeps figures until somebody asks. It is vLLM's logger of one engine, and makes itself."""

    def __init__(self, vllm_config: object = None, engine_index: int = 0) -> None:
        self.busy_s = 0.0
        self._busy_since_s: float | None = None
        self._reset()

    def __call__(self, vllm_config: object, engine_index: int = 0) -> Meter:
        """Return this one, when vLLM asks for a logger."""
        return self

    def _reset(self) -> None:
        self._kv_cache_use, self._running, self._waiting = 0.0, 0, 0
        self._preemptions, self._tokens = 0, 0
        self._first_tokens_s: list[float] = []
        self.busy_s = 0.0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take one step's figures in."""
        if scheduler_stats is not None:
            self._kv_cache_use = max(self._kv_cache_use, scheduler_stats.kv_cache_usage)
            self._running = max(self._running, scheduler_stats.num_running_reqs)
            self._waiting = max(self._waiting, scheduler_stats.num_waiting_reqs)
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            self._tokens += iteration_stats.num_generation_tokens
            self._first_tokens_s += iteration_stats.time_to_first_tokens_iter

    def log_engine_initialized(self) -> None:
        """Say nothing."""

    def busy(self, now: bool) -> None:
        """Take note of whether something is in flight, where steps are not timed."""
        if self._busy_since_s is not None:
            self.busy_s += time.perf_counter() - self._busy_since_s
        self._busy_since_s = time.perf_counter() if now else None

    def take(self, peak_bytes: Sequence[int]) -> Seen:
        """Return what was seen since the last call."""
        self.busy(self._busy_since_s is not None)
        first = self._first_tokens_s
        seen = Seen(
            kv_cache_use=self._kv_cache_use,
            preemptions=self._preemptions,
            running=self._running,
            waiting=self._waiting,
            generated_tokens=self._tokens,
            busy_s=self.busy_s,
            first_token_s=sum(first) / len(first) if first else None,
            peak_bytes=tuple(peak_bytes),
        )
        self._reset()
        return seen
