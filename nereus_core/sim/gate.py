"""The gate between a running job and a boundary: who is inside which stage, and who must wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from nereus_core.errors import BoundaryTimeout, NotAtBoundary, WaitTimeout
from nereus_core.workload import ModelStage


class Gate:
    """Lets stages run while they are not held, and holds them while they do not run.

    A synchronous job is at a safe boundary between steps. An asynchronous one is at a boundary
    whenever it is not between the start of training and the weight synchronisation that ends it;
    generation may go on meanwhile.
    """

    def __init__(self, *, asynchronous: bool, wait_s: float) -> None:
        self._asynchronous, self._wait_s = asynchronous, wait_s
        self._changed = threading.Condition()
        self._held: frozenset[ModelStage] | None = None
        self._inside: ModelStage | None = None
        self._in_flight = False
        self._critical = False
        self._stop_at: ModelStage | None = None
        self._stopped = False

    @property
    def held(self) -> frozenset[ModelStage] | None:
        """Stages that the open boundary holds; None outside one."""
        return self._held

    @property
    def inside(self) -> ModelStage | None:
        """The stage that runs now."""
        return self._inside

    # --- The job's side -------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be a step in flight; a second one waits for the first."""
        with self._changed:
            self._wait(lambda: not self._in_flight, "the step in flight")
            self._in_flight = True
        try:
            yield
        finally:
            with self._changed:
                self._in_flight = self._critical = False
                self._changed.notify_all()

    @contextmanager
    def critical(self) -> Iterator[None]:
        """Be between the start of training and the weight synchronisation."""
        with self._changed:
            self._wait(lambda: not self._held, "the boundary to close")
            self._critical = True
        try:
            yield
        finally:
            with self._changed:
                self._critical = False
                self._changed.notify_all()

    @contextmanager
    def stage(self, stage: ModelStage, *, receiving: bool = False) -> Iterator[None]:
        """Run one stage, or have it receive weights; waits while a boundary holds it."""
        with self._changed:
            self._wait(
                lambda: stage not in (self._held or ()), f"the boundary that holds {stage} to close"
            )
            self._inside = stage
            if self._stop_at == stage and not receiving:
                self._stopped = True
                self._changed.notify_all()
                self._wait(lambda: self._stop_at is None, f"leave to go on with {stage}")
        try:
            yield
        finally:
            with self._changed:
                self._inside = None
                self._changed.notify_all()

    # --- The boundary's side --------------------------------------------------------------------

    def close_on(self, stages: Collection[ModelStage], timeout_s: float) -> frozenset[ModelStage]:
        """Wait for the boundary and hold the stages from there on.

        Raises:
            NotAtBoundary: a boundary is already open.
            BoundaryTimeout: the job was not at a boundary in time; names the stage that ran.
        """
        wanted = frozenset(stages)
        with self._changed:
            if self._held is not None:
                raise NotAtBoundary("a second boundary (they do not nest) cannot open")
            if not self._changed.wait_for(lambda: not self._busy(wanted), timeout_s):
                raise BoundaryTimeout(self._inside or "the step", timeout_s)
            if self._held is not None:
                raise NotAtBoundary("a second boundary (they do not nest) cannot open")
            self._held = wanted
        return wanted

    def open(self) -> None:
        """Let the stages go on."""
        with self._changed:
            self._held = None
            self._changed.notify_all()

    def _busy(self, wanted: frozenset[ModelStage]) -> bool:
        if self._asynchronous:
            return self._critical or self._inside in wanted
        return self._in_flight

    # --- The observer's side --------------------------------------------------------------------

    def stop_at(self, stage: ModelStage) -> None:
        """Let the next step stop inside a stage, until `go_on`."""
        with self._changed:
            self._stop_at, self._stopped = stage, False

    def wait_stopped(self) -> None:
        """Wait until a step stands where `stop_at` said."""
        with self._changed:
            self._wait(lambda: self._stopped, f"a step to reach {self._stop_at}")

    def go_on(self) -> None:
        """Let the stopped step finish."""
        with self._changed:
            self._stop_at = None
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool], awaited: str) -> None:
        if not self._changed.wait_for(until, self._wait_s):
            raise WaitTimeout(awaited, self._wait_s)
