"""limits: an end to what verl awaits without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from nereus_core.errors import WaitTimeout

T = TypeVar("T")


def limited(work: Callable[[], T], awaited: str, timeout_s: float) -> T:
    """Run work on a thread of its own; one that is late is left to itself.

    Raises:
        WaitTimeout: it did not end in time.
        BaseException: what it raised.
    """
    ended: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            ended.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=awaited, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    if not ended:
        raise WaitTimeout(awaited, timeout_s)
    return ended[0]
