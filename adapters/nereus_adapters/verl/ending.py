"""ending: the end of a rollout replica, and the door that it leaves for requests that come late.

A request may be on its way to a server that has just left the balancer: verl's client took its
handle before, or what the server had generated has not reached the client yet (vLLM's pause waits a
moment for that, no longer). Of a process that is gone the client gets an error, for which verl
gives the prompt up with all its responses. So a server that turns requests away goes on doing that
for a while after all that it had of a device has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import ray

from nereus_adapters.ray_calls import apart

_log = logging.getLogger("nereus")
SHUTDOWN_S = 30.0
"""For a server to end what it started, before it is killed. Chosen, not measured."""
DOOR_S = 60.0
"""That a server goes on turning requests away. Chosen, not measured."""


def end(replicas: Sequence[Any], *, doors: Sequence[bool] = ()) -> None:
    """End the engines of replicas, and their servers.

    Args:
        replicas: verl's.
        doors: Of each, whether it turns requests away, and may go on with that; none by default.
    """
    turning = [r for r, door in zip(replicas, doors, strict=bool(doors)) if door]
    kept = {server._actor_id for replica in turning for server in replica.servers}
    servers = [server for replica in replicas for server in getattr(replica, "servers", [])]
    asked = [apart(server, shutdown_engine) for server in servers]
    for server, answer in zip(servers, asked, strict=True):
        try:
            ray.get(answer, timeout=SHUTDOWN_S)
        except Exception as error:  # a server that does not answer is ended all the same
            _log.warning("a rollout server did not end its engine and is killed: %s", error)
            kept.discard(server._actor_id)
    _kill(server for server in servers if server._actor_id not in kept)
    if kept:
        left = [server for server in servers if server._actor_id in kept]
        timer = threading.Timer(DOOR_S, _kill, [left])
        timer.daemon = True  # a job that ends takes them along
        timer.start()


def _kill(servers: Iterable[Any]) -> None:
    for server in servers:
        ray.kill(server)


def shutdown_engine(server: Any) -> None:
    """End what a rollout server started; runs inside it."""
    engine: Any = getattr(server, "engine", None)
    if hasattr(engine, "shutdown"):
        engine.shutdown()
