"""Gate: stages run while they are not held; a boundary holds them while none of them runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from nereus_core.errors import BoundaryTimeout, NotAtBoundary, WaitTimeout
from nereus_core.workload import ModelStage


class Gate:
    """Between the threads that step a job and the one that changes its units.

    A synchronous job is at a safe boundary between steps. An asynchronous one is at a boundary
    whenever it is not between the start of training and the weight synchronization that ends it,
    and no stage to be held runs; other stages may go on meanwhile.

    Args:
        wait_s: most seconds that the job waits for a boundary to close.
        asynchronous: whether stages of different steps overlap.
    """

    def __init__(self, wait_s: float, *, asynchronous: bool = False) -> None:
        self._wait_s, self._asynchronous = wait_s, asynchronous
        self._changed = threading.Condition()
        self._held: frozenset[ModelStage] | None = None
        self._inside: tuple[ModelStage, ...] = ()
        self._in_flight = False
        self._critical = False
        self._stop_at: ModelStage | None = None
        self._stopped = False

    @property
    def held(self) -> frozenset[ModelStage] | None:
        """Stages that the open boundary holds; None outside one."""
        return self._held

    @property
    def inside(self) -> tuple[ModelStage, ...]:
        """Stages that run now, in the order in which they began."""
        return self._inside

    # --- The job's side -------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be the step in flight; a second one waits for the first."""
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
        """Be between the start of training and the weight synchronization that ends it."""
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
    def stages(self, *stages: ModelStage, receiving: bool = False) -> Iterator[None]:
        """Run stages, or have them receive weights; waits while a boundary holds one of them."""
        with self._changed:
            self._wait(
                lambda: not (self._held or frozenset()).intersection(stages),
                f"the boundary that holds {', '.join(map(str, stages))} to close",
            )
            self._inside += stages
        try:
            if not receiving:
                self._stop_in(stages)
            yield
        finally:
            with self._changed:
                left = list(self._inside)
                for stage in stages:
                    left.remove(stage)
                self._inside = tuple(left)
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
            self._refuse_second()
            if not self._changed.wait_for(lambda: not self._busy(wanted), timeout_s):
                running = self._stop_at if self._stopped else next(iter(self._inside), "the step")
                raise BoundaryTimeout(running, timeout_s)
            self._refuse_second()
            self._held = wanted
        return wanted

    def open(self) -> None:
        """Let the stages go on."""
        with self._changed:
            self._held = None
            self._changed.notify_all()

    def _busy(self, wanted: frozenset[ModelStage]) -> bool:
        if self._asynchronous:
            return self._critical or not wanted.isdisjoint(self._inside)
        return self._in_flight

    def _refuse_second(self) -> None:
        if self._held is not None:
            raise NotAtBoundary("a second boundary (they do not nest) cannot open")

    # --- A harness's side -----------------------------------------------------------------------

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
            self._stop_at, self._stopped = None, False
            self._changed.notify_all()

    @contextmanager
    def stepping(
        self, step: Callable[[], object], stage: ModelStage, timeout_s: float
    ) -> Iterator[None]:
        """Run one step on a thread of its own and hold it inside a stage; on leaving, it ends.

        Raises:
            WaitTimeout: the step did not reach the stage, or did not end in ``timeout_s``.
            BaseException: what the step raised.
        """
        raised: list[BaseException] = []

        def run() -> None:
            try:
                step()
            except BaseException as error:
                raised.append(error)

        self.stop_at(stage)
        thread = threading.Thread(target=run, name="step in flight")
        thread.start()
        try:
            self.wait_stopped()
            yield
        finally:
            self.go_on()
            thread.join(timeout_s)
        if thread.is_alive():
            raise WaitTimeout(f"the step held inside {stage} to finish", timeout_s)
        if raised:
            raise raised[0]

    def _stop_in(self, stages: Collection[ModelStage]) -> None:
        with self._changed:
            if self._stop_at in stages:
                self._stopped = True
                self._changed.notify_all()
                self._wait(lambda: self._stop_at is None, f"leave to go on with {self._stop_at}")

    def _wait(self, until: Callable[[], bool], awaited: str) -> None:
        if not self._changed.wait_for(until, self._wait_s):
            raise WaitTimeout(awaited, self._wait_s)
