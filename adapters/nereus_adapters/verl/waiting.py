"""waiting: a condition that others bring about, looked at again and again; for the harness."""

from __future__ import annotations

import time
from collections.abc import Callable

from nereus_core.errors import WaitTimeout

POLL_S = 0.02
"""Between looks; chosen, not measured."""


def until(condition: Callable[[], object], awaited: str, timeout_s: float) -> None:
    """Return once a condition holds.

    Raises:
        WaitTimeout: it did not in time; names what was awaited.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise WaitTimeout(awaited, timeout_s)
        time.sleep(POLL_S)
