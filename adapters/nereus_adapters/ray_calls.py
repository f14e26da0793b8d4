"""Calls into a framework's Ray actors: each waits at most so long, and says what it waited for.

Two ways to wait. `ask` and `outcome` raise as soon as one actor fails. `call_all` and `gathered`
let every actor finish first: whoever goes on with the others afterwards finds them free.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from nereus_core.cluster import Device
from nereus_core.errors import SeatDead, WaitTimeout


def inside(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Start ``function(actor, *args)`` in an actor's own process; returns the reference.

    The function is module-level, so that the process imports it, and no coroutine function. It
    runs when the actor's call in progress has ended; in an asynchronous actor, at once.
    """
    return handle.__ray_call__.remote(function, *args)


def apart(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Start a function as `inside` does, on a thread of its own where the actor is asynchronous."""
    return inside(handle, on_own_stack, function, *args)


def on_own_stack(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function where it has a whole stack; runs inside the actor.

    An asynchronous actor runs such calls on a fiber of Ray's, whose stack is a fraction of a
    thread's: unpickling a checkpoint there overwrote what lay below it. The actor's loop is blocked
    until the function returns: no other call of the actor runs meanwhile.
    """
    if threading.current_thread() is threading.main_thread():
        return function(actor, *args)
    begin, torch = None, sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        # A new thread begins on device 0, whatever the caller's is.
        begin = partial(torch.cuda.set_device, torch.cuda.current_device())
    with ThreadPoolExecutor(1, initializer=begin) as thread:
        return thread.submit(function, actor, *args).result()


def outcome(refs: Any, awaited: str, timeout_s: float) -> Any:
    """Return the values of references.

    Raises:
        WaitTimeout: they were not there in time; names what was awaited.
        SeatDead: an actor has ended.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError as error:
        raise WaitTimeout(awaited, timeout_s) from error
    except RayActorError as error:
        raise SeatDead(getattr(error, "actor_id", None) or "of Ray", None, awaited) from error


def ask(
    handles: Sequence[Any],
    function: Callable[..., Any],
    *args: Any,
    awaited: str,
    timeout_s: float,
) -> list[Any]:
    """Run a function in every actor and return what each returned, in their order."""
    found = outcome([inside(h, function, *args) for h in handles], awaited, timeout_s)
    return list(found)


def call_all(
    workers: Mapping[Device, Any],
    function: Callable[..., Any],
    *args: Any,
    awaited: str,
    timeout_s: float,
    each: Mapping[Device, Sequence[Any]] | None = None,
) -> dict[Device, Any]:
    """Run ``function(actor, *args)`` inside the process of every device at once, as `apart` does.

    Args:
        workers: Ray actors by the device they hold.
        function: As `inside` says.
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
        device: apart(worker, function, *args, *(each[device] if each else ()))
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
        except RayActorError as error:
            raise SeatDead(device, None, awaited) from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
    if late:
        silent = next(device for device, answer in asked.items() if answer in late)
        raise WaitTimeout(f"{awaited} on {silent}", timeout_s)
    return found
