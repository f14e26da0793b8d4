"""SeatActor: a Ray actor around a Seat. Imports nothing heavy until the first call."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any


class SeatActor:
    """Runs a seat's methods, one after another, in the order in which they were sent.

    Frames are pickled by the driver and here: what crosses is the same as on the local pool, and
    Ray hands no read-only views of its object store to the seat.
    """

    def __init__(self, settings: bytes) -> None:
        self._settings = settings
        self._seat: Callable[[], object] | None = None
        self._ended = threading.Event()

    def run(self, frame: bytes) -> bytes:
        """Run one pickled Call; returns a pickled Reply."""
        from nereus_adapters.torch.answering import answer
        from nereus_adapters.torch.seat import once

        if self._seat is None:
            self._seat = once(_loaded(self._settings))
        reply = answer(self._seat, _loaded(frame))
        return pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)

    def watch(self) -> None:
        """Return when the seat has been told to go; fails when the actor dies before."""
        self._ended.wait()

    def end(self) -> None:
        """Let `watch` return."""
        self._ended.set()


def _loaded(frame: bytes) -> Any:
    """Unpickle what the driver sent: Ray delivers only calls of the job that owns the actor."""
    return pickle.loads(frame)
