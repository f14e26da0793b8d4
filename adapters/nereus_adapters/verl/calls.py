"""calls: every wait for verl's processes has a timeout; its error names what was awaited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from nereus_core.cluster import Device
from nereus_core.errors import SeatDead, WaitTimeout


def call_all(
    workers: Mapping[Device, Any],
    function: Callable[..., Any],
    *args: Any,
    awaited: str,
    timeout_s: float,
    each: Mapping[Device, Sequence[Any]] | None = None,
) -> dict[Device, Any]:
    """Run ``function(worker, *args)`` inside every worker process at once.

    Args:
        workers: Ray actors by the device they hold.
        function: Module-level, so that a worker imports it.
        args: The same for all.
        awaited: For the error, e.g. ``shards of actor/train``.
        timeout_s: For all of them together.
        each: Arguments of each worker, after ``args``.

    Raises:
        WaitTimeout: not all answered in time; names one that did not.
        SeatDead: a worker process is gone; names its device.
        Exception: what the function raised in a worker.
    """
    asked = {
        device: worker.__ray_call__.remote(function, *args, *(each[device] if each else ()))
        for device, worker in workers.items()
    }
    return gathered(asked, awaited=awaited, timeout_s=timeout_s)


def gathered(asked: Mapping[Device, Any], *, awaited: str, timeout_s: float) -> dict[Device, Any]:
    """Wait for answers of workers; raises what `call_all` does."""
    left = list(asked.values())
    _, late = ray.wait(left, num_returns=len(left), timeout=timeout_s) if left else ([], [])
    found = {}
    for device, answer in asked.items():
        if answer in late:
            continue
        try:
            found[device] = ray.get(answer, timeout=timeout_s)
        except ray.exceptions.RayActorError as error:
            raise SeatDead(device, None, awaited) from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
    if late:
        silent = next(device for device, answer in asked.items() if answer in late)
        raise WaitTimeout(f"{awaited} on {silent}", timeout_s)
    return found
