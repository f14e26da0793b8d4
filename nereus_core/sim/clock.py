"""Clocks of the simulated world: virtual seconds that are spent, or the wall's that pass."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Tells seconds, and lets simulated work take some."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def spend(self, seconds: float) -> None:
        """Let simulated work take time."""
        ...


class VirtualClock:
    """Time passes only when it is spent: years of a cluster in a second of ours. Thread-safe."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds spent so far, by whatever thread."""
        with self._lock:
            return self._now_s

    def spend(self, seconds: float) -> None:
        """Move time on."""
        with self._lock:
            self._now_s += seconds


class WallClock:
    """The wall's time; simulated work takes only what simulating it takes."""

    def now_s(self) -> float:
        """Seconds of a monotonic clock."""
        return time.perf_counter()

    def spend(self, seconds: float) -> None:
        """Do nothing: nobody waits for imaginary work."""
