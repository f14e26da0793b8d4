"""Meter: what an engine process sees of its own work, between two readings."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from typing import Any

from nereus_adapters.rollout.resident import take_peak_bytes


class Meter:
    """Counts tokens and times, looks at the scheduler's load while there is any.

    Args:
        engine: an `sglang.Engine`.
        base_bytes: that its rank processes had before they were ranks.
    """

    def __init__(self, engine: Any, base_bytes: int) -> None:
        self._engine, self._base_bytes = engine, base_bytes
        self._arrived_s: dict[str, float] = {}
        self._retractions: dict[str, int] = {}
        self._busy_since_s: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._cache_use, self._running, self._waiting = 0.0, 0, 0
        self._preemptions, self._tokens, self._busy_s = 0, 0, 0.0
        self._first_token_s: list[float] = []

    def arrived(self, prompt_id: str) -> None:
        """A prompt has come."""
        now_s = time.perf_counter()
        if not self._arrived_s:
            self._busy_since_s = now_s
        self._arrived_s[prompt_id] = now_s
        self._retractions[prompt_id] = -1

    def drew(self, prompt_id: str, num_tokens: int, retractions: int) -> None:
        """Tokens of a response have come."""
        known = self._retractions[prompt_id]
        if known < 0 and num_tokens:
            self._first_token_s.append(time.perf_counter() - self._arrived_s[prompt_id])
        self._preemptions += max(0, retractions - max(0, known))
        self._retractions[prompt_id] = max(retractions, known, 0 if num_tokens else known)
        self._tokens += num_tokens
        # Looks come between steps of the scheduler; what has tokens and goes on is running.
        drawing = sum(known >= 0 for known in self._retractions.values())
        self._running = max(self._running, drawing)

    def left(self, prompt_id: str) -> None:
        """A response has ended."""
        del self._arrived_s[prompt_id], self._retractions[prompt_id]
        if not self._arrived_s:
            self._busy_s += self._since()

    def _since(self) -> float:
        now_s, since_s = time.perf_counter(), self._busy_since_s
        self._busy_since_s = now_s if self._arrived_s else None
        return 0.0 if since_s is None else now_s - since_s

    async def watch(self, busy: Callable[[], bool], every_s: float) -> None:
        """Look at the load again and again; a look that fails is told in the engine's log."""
        while True:
            if busy():
                try:
                    await self._look()
                except Exception:
                    traceback.print_exc()
            await asyncio.sleep(every_s)

    async def _look(self) -> None:
        for load in await self._engine.tokenizer_manager.get_loads():
            self._cache_use = max(self._cache_use, load.token_usage)
            self._running = max(self._running, load.num_running_reqs)
            self._waiting = max(self._waiting, load.num_waiting_reqs)

    def take(self) -> dict[str, Any]:
        """Return what was seen since the last call."""
        self._busy_s += self._since()
        first = self._first_token_s
        found = {
            "kv_cache_use": min(1.0, self._cache_use),
            "preemptions": self._preemptions,
            "running": self._running,
            "waiting": self._waiting,
            "generated_tokens": self._tokens,
            "busy_s": self._busy_s,
            "first_token_s": sum(first) / len(first) if first else None,
            "peak_bytes": [
                max(0, take_peak_bytes(pid) - self._base_bytes)
                for pid in self._engine.get_all_child_pids()
            ],
        }
        self._reset()
        return found
