"""sleeping: replicas out of service that keep their processes, for the layout that comes back.

A replica that starts imports, loads and compiles for a minute; one that sleeps has given back its
weights and its cache, and takes the next weight synchronization like any other. What its processes
keep of a device is set aside from the memory that plans may count on, whether one sleeps or not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

ACCELERATOR_BYTES = 1 << 30
"""What the processes of a sleeping replica keep of an accelerator: a context, communicators and
captured graphs. Chosen, not measured."""


def asleep_bytes(chosen: int | None, weights_bytes: int, *, on_cpu: bool) -> int:
    """Return what a sleeping replica is counted to keep on each of its devices.

    Args:
        chosen: ``backend.sleeping_bytes``.
        weights_bytes: Of a whole model.
        on_cpu: Where vLLM's sleep releases nothing.
    """
    if chosen is not None:
        return chosen
    return weights_bytes if on_cpu else ACCELERATOR_BYTES


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A replica that is out of service."""

    replica: Any
    tp: int
    seats: tuple[Hashable, ...]
    """The processes beside which it serves, in order."""


class Sleepers:
    """Replicas that sleep, up to a number beside each process.

    Args:
        each: That number; 0 keeps none.
    """

    def __init__(self, each: int) -> None:
        self._each = each
        self._kept: list[Sleeper] = []
        """In the order in which they fell asleep."""

    def keep(self, sleeper: Sleeper) -> list[Any]:
        """Keep a replica; returns those, it among them, that have to end for want of room."""
        self._kept.append(sleeper)
        crowded = []
        for seat in sleeper.seats:
            beside = [s for s in self._kept if seat in s.seats]
            for oldest in beside[: max(0, len(beside) - self._each)]:
                self._kept.remove(oldest)
                crowded.append(oldest.replica)
        return crowded

    def take(self, tp: int, seats: Sequence[Hashable]) -> Any | None:
        """Give up a replica of this layout beside these processes; None where none sleeps."""
        for sleeper in reversed(self._kept):
            if (sleeper.tp, sleeper.seats) == (tp, tuple(seats)):
                self._kept.remove(sleeper)
                return sleeper.replica
        return None

    def leave(self, seats: Sequence[Hashable] | None = None) -> list[Any]:
        """Give up all replicas beside any of some processes; beside any at all by default."""
        gone = [s for s in self._kept if seats is None or set(s.seats) & set(seats)]
        self._kept = [s for s in self._kept if s not in gone]
        return [s.replica for s in gone]
