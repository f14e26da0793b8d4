"""Lock: holds the generator of an asynchronous job while its engines or weights change."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from nereus_core.errors import BoundaryTimeout
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, ModelStage


@contextmanager
def held(trainer: Any, stages: Collection[ModelStage], timeout_s: float) -> Iterator[None]:
    """Hold OpenRLHF's `vllm_lock` where there is one and engines or their weights are concerned.

    Raises:
        BoundaryTimeout: generation went on for longer.
    """
    lock = getattr(trainer, "vllm_lock", None)
    if lock is None or {ACTOR_GENERATE, ACTOR_TRAIN}.isdisjoint(stages):
        yield
        return
    asked = lock.acquire.remote()
    try:
        ray.get(asked, timeout=timeout_s)
    except GetTimeoutError as error:
        # The lock has no way to take a request back: whoever asked must still give it up.
        threading.Thread(target=_give_up, args=(lock, asked), daemon=True).start()
        raise BoundaryTimeout(ACTOR_GENERATE, timeout_s) from error
    try:
        yield
    finally:
        ray.get(lock.release.remote(), timeout=timeout_s)


def _give_up(lock: Any, asked: Any) -> None:
    ray.get(asked)
    ray.get(lock.release.remote())
