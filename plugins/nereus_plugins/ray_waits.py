"""ray_waits: an end to the waits of a framework that asks Ray without a timeout.

``ray.get`` in a worker process does not hear the alarm of `deadline`: it has to be given a timeout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nereus_core.errors import WaitTimeout
from nereus_plugins.deadline import deadline

ALARM_S = 5.0
"""From Ray's own timeout to the alarm, which is for waits that are not Ray's. Chosen."""


@contextmanager
def ray_waits(awaited: str, timeout_s: float) -> Iterator[None]:
    """Let ``ray.get`` raise WaitTimeout, naming what was awaited, in a block that takes too long.

    Of the whole process while the block runs: a thread that waits without a timeout gets this one.
    """
    import ray

    end_s, once = time.monotonic() + timeout_s, ray.get

    def get(refs: Any, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        left_s = max(0.0, end_s - time.monotonic())
        own_s = left_s if timeout is None else min(timeout, left_s)
        try:
            return once(refs, *args, timeout=own_s, **kwargs)
        except ray.exceptions.GetTimeoutError as error:
            # By whose limit, not by the clock: Ray counts whole milliseconds, and ends early.
            if own_s < left_s:
                raise
            raise WaitTimeout(awaited, timeout_s) from error

    ray.get = get
    try:
        yield
    finally:
        ray.get = once


@contextmanager
def limited(awaited: str, timeout_s: float) -> Iterator[None]:
    """Raise WaitTimeout, naming what was awaited, whatever it is that a block waits for."""
    with ray_waits(awaited, timeout_s), deadline(awaited, timeout_s + ALARM_S):
        yield
