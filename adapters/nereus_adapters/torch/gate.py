"""Gate: stages run while they are not held; a boundary holds them while no step is in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from nereus_core.errors import BoundaryTimeout, NotAtBoundary, WaitTimeout
from nereus_core.workload import ModelStage


class Gate:
    """Between the thread that steps the job and the one that changes its units.

    Args:
        wait_s: most seconds a step waits for a boundary to close.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._held: frozenset[ModelStage] | None = None
        self._inside: tuple[ModelStage, ...] = ()
        self._in_flight = False
        self._stop_at: ModelStage | None = None
        self._stopped = False

    @property
    def held(self) -> frozenset[ModelStage] | None:
        """Stages that the open boundary holds; None outside one."""
        return self._held

    @property
    def inside(self) -> tuple[ModelStage, ...]:
        """Stages that run now."""
        return self._inside

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be the step in flight."""
        with self._changed:
            self._wait(lambda: not self._in_flight, "the step in flight")
            self._in_flight = True
        try:
            yield
        finally:
            with self._changed:
                self._in_flight = False
                self._changed.notify_all()

    @contextmanager
    def stages(self, stages: Collection[ModelStage]) -> Iterator[None]:
        """Run stages; waits while a boundary holds one of them."""
        with self._changed:
            self._wait(
                lambda: not (self._held or frozenset()).intersection(stages),
                f"the boundary that holds {', '.join(map(str, stages))} to close",
            )
            self._inside = tuple(stages)
            if self._stop_at in stages:
                self._stopped = True
                self._changed.notify_all()
                self._wait(lambda: self._stop_at is None, f"leave to go on with {self._stop_at}")
        try:
            yield
        finally:
            with self._changed:
                self._inside = ()
                self._changed.notify_all()

    def close_on(self, stages: Collection[ModelStage], timeout_s: float) -> frozenset[ModelStage]:
        """Wait until no step is in flight and hold the stages from there on.

        Raises:
            NotAtBoundary: a boundary is already open.
            BoundaryTimeout: a step was still in flight; names the stage that ran.
        """
        with self._changed:
            self._refuse_second()
            if not self._changed.wait_for(lambda: not self._in_flight, timeout_s):
                running = self._stop_at if self._stopped else next(iter(self._inside), "the step")
                raise BoundaryTimeout(running, timeout_s)
            self._refuse_second()
            self._held = frozenset(stages)
            return self._held

    def open(self) -> None:
        """Let the stages go on."""
        with self._changed:
            self._held = None
            self._changed.notify_all()

    def stop_at(self, stage: ModelStage | None) -> None:
        """Let the next step stop inside a stage; None lets it go on. For tests."""
        with self._changed:
            self._stop_at, self._stopped = stage, False
            self._changed.notify_all()

    def wait_stopped(self) -> None:
        """Wait until a step stands where `stop_at` said."""
        with self._changed:
            self._wait(lambda: self._stopped, f"a step to reach {self._stop_at}")

    def _refuse_second(self) -> None:
        if self._held is not None:
            raise NotAtBoundary("a second boundary (they do not nest) cannot open")

    def _wait(self, until: Callable[[], bool], awaited: str) -> None:
        if not self._changed.wait_for(until, self._wait_s):
            raise WaitTimeout(awaited, self._wait_s)
