"""Launched: a job that an adapter started itself, for ``nereus run``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Launched(Protocol):
    """A job in the hands of ``nereus run``, driven one RL step at a time.

    `step` may raise SeatDead or UnitLost when a device goes; the controller then replans from what
    is intact and the same step is asked for again.
    """

    handle: object
    """What ``nereus_create_adapter`` attaches to."""

    @property
    def finished(self) -> bool:
        """Whether the job has run all the steps it was configured for."""
        ...

    def step(self) -> Mapping[str, float]:
        """Run one RL step; returns the job's own figures (reward, loss ...) for display."""
        ...

    def close(self) -> None:
        """End everything the job started. Safe to call twice."""
        ...


@runtime_checkable
class Timed(Protocol):
    """What a job on a clock of its own has besides: a simulated one, whose seconds are not ours."""

    def clock_s(self) -> float:
        """Seconds since some fixed moment, on the job's clock."""
        ...
