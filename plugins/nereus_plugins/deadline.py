"""deadline: an end to a framework's own waits, which have none.

A trainer that calls its workers without a timeout hangs for good when one of them does. In the main
thread, which is where a trainer runs, an alarm cuts any wait short and says what it was for.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nereus_core.errors import WaitTimeout


@contextmanager
def deadline(awaited: str, timeout_s: float) -> Iterator[None]:
    """Raise WaitTimeout, naming what was awaited, in a block that takes too long.

    Outside the main thread, where no alarm can be heard, the block has no limit; one inside another
    has its own and gives the outer one back, less the seconds it took.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise WaitTimeout(awaited, timeout_s)

    before = signal.signal(signal.SIGALRM, ring)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        rest_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (timeout_s - rest_s)))
