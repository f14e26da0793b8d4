"""Launched: a job that an adapter started itself, for ``nereus run``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
class Saves(Protocol):
    """What a job that can be written to disk has besides.

    One whose ``config.checkpoint.resume`` is set starts from what `save` wrote.
    """

    @property
    def steps_done(self) -> int:
        """RL steps done since the job first began, before it was resumed too."""
        ...

    def save(self, folder: Path) -> None:
        """Write the state after the step done last; ``folder`` appears at once and complete.

        Called between steps, after a step that was completed.

        Raises:
            CheckpointError: it cannot be written; ``folder`` is as it was.
            SeatDead, UnitLost: a device was lost; ``folder`` is as it was.
        """
        ...


@runtime_checkable
class Timed(Protocol):
    """What a job on a clock of its own has besides: a simulated one, whose seconds are not ours."""

    def clock_s(self) -> float:
        """Seconds since some fixed moment, on the job's clock."""
        ...
