"""inside_server: what the adapter runs inside the process of a rollout server.

Every function takes the server, verl's own object, and is called by `ray_calls.inside` or `apart`.
"""

from __future__ import annotations

import threading
from typing import Any

import ray


def let_go(server: Any) -> bool:
    """Turn away the requests that wait at a rollout server's closed gate.

    verl turns away those that come from now on, and leaves those waiting that are there
    (vllm_async_server.py, ``_park_until_admitted``).

    Returns:
        Whether it has such a gate, and turns requests away.
    """
    gate: Any = getattr(server, "_resume_event", None)
    if gate is None or not getattr(server, "_rejecting", False):
        return False
    for waiter in tuple(gate._waiters):  # on the loop that they wait on
        waiter.get_loop().call_soon_threadsafe(gate.set)
    return True


def unanswered(server: Any) -> int:
    """Count requests that vLLM has stopped and whose answers are on their way.

    Its pause returns a moment after the engine is idle, whatever has become of these by then.
    """
    front = getattr(getattr(server, "engine", None), "output_processor", None)
    return len(getattr(front, "request_states", ()))


def is_well(server: Any) -> bool:
    """Whether a rollout server's engine is not known to have failed."""
    return not getattr(getattr(server, "engine", None), "errored", False)


def shutdown(server: Any, door_s: float | None) -> None:
    """End what a rollout server started.

    Args:
        server: verl's.
        door_s: After which its process ends itself, whatever has become of the driver by then;
            None leaves that to whoever asks.
    """
    engine: Any = getattr(server, "engine", None)
    if hasattr(engine, "shutdown"):
        engine.shutdown()
    if door_s is not None:
        timer = threading.Timer(door_s, ray.kill, [ray.get_runtime_context().current_actor])
        timer.daemon = True
        timer.start()
