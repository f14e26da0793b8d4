"""Calls into Ray actors: each waits at most so long, and its error names what was awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from nereus_core.errors import SeatDead, WaitTimeout


def inside(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Start ``function(actor, *args)`` in an actor's own process; returns the reference.

    The function runs when the actor's call in progress has ended; on an engine, whose actor is
    asynchronous, at once. It must not be a coroutine function.
    """
    return handle.__ray_call__.remote(function, *args)


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
