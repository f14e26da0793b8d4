"""paced: one run of a loop on a thread of its own, which stands still at its boundaries."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from nereus_core.errors import WaitTimeout


class LoopOver(RuntimeError):
    """A loop was to go on that has ended, or whose last turn never came to its boundary."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} takes no more turns: {why}. Launch the job again.")


class Paced:
    """One run of a loop; nothing of it, however late it comes, reaches the next run.

    Args:
        loop: Calls `stand` of this at every boundary, and lets what that raises end it.
        name: Of the loop, for errors.
        turn_s: Most seconds from one boundary to the next, and for the loop to end.
        stand_s: Most seconds that it stands at a boundary.
    """

    def __init__(
        self, loop: Callable[[Paced], None], name: str, *, turn_s: float, stand_s: float
    ) -> None:
        self._loop, self._name = loop, name
        self._turn_s, self._stand_s = turn_s, stand_s
        self._go: queue.Queue[bool] = queue.Queue()
        self._came: queue.Queue[BaseException | None] = queue.Queue()
        self._over = ""
        """Why there are no more turns."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def turn(self) -> None:
        """Let the loop go on to its next boundary; the first turn starts it.

        Raises:
            LoopOver: it returns instead of coming to a boundary, or takes no turns any more.
            WaitTimeout: it does not come in time; it takes no turn from then on.
            BaseException: what the loop raised.
        """
        if self._over:
            raise LoopOver(self._name, self._over)
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.put(True)
        try:
            raised = self._came.get(timeout=self._turn_s)
        except queue.Empty:
            self._over = f"the last one did not end within {self._turn_s:g} s"
            raise WaitTimeout(f"the next boundary of {self._name}", self._turn_s) from None
        if raised is not None:
            self._over = f"it ended with {type(raised).__name__}: {raised}"
            raise raised

    def stand(self) -> None:
        """Stand at a boundary until the next turn; the loop calls it, on its thread.

        Raises:
            WaitTimeout: no turn came in time; the next one raises this too.
        """
        self._came.put(None)
        try:
            on = self._go.get(timeout=self._stand_s)
        except queue.Empty:
            raise WaitTimeout(f"a turn of {self._name}", self._stand_s) from None
        if not on:
            raise _Ended

    def end(self) -> None:
        """End the loop at its next boundary; raises WaitTimeout where it comes to none."""
        self._over = self._over or "it was ended"
        if self._thread.ident is None:
            return
        self._go.put(False)
        self._thread.join(self._turn_s)
        if self._thread.is_alive():
            raise WaitTimeout(f"{self._name} to end", self._turn_s)

    def _run(self) -> None:
        try:
            self._loop(self)
        except _Ended:
            return
        except BaseException as error:
            self._came.put(error)
        else:
            self._came.put(LoopOver(self._name, "it has returned"))


class _Ended(BaseException):
    """Raised in the loop to end it where it stands."""
