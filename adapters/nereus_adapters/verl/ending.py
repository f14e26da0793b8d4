"""ending: the end of a rollout replica, and the door that it leaves for requests that come late.

A request may be on its way to a server that has just left the balancer: verl's client took its
handle before, or what the server had generated has not reached the client yet (vLLM's pause waits a
moment for that, no longer). Of a process that is gone the client gets an error, for which verl
gives the prompt up with all its responses. So a server that turns requests away goes on doing that
for a while after all that it had of a device has ended. Of a replica on several nodes that is the
first server alone: it has the gate, and the others' engines live as long as their processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray

from nereus_adapters.ray_calls import apart
from nereus_adapters.verl.inside_server import shutdown
from nereus_core.errors import WaitTimeout

_log = logging.getLogger("nereus")
SHUTDOWN_S = 30.0
"""For servers to end what they started, before they are killed. Chosen, not measured."""
DOOR_S = 60.0
"""That a server goes on turning requests away. Chosen, not measured."""


def end(replicas: Sequence[Any], *, doors: Sequence[Any] = (), door_s: float = DOOR_S) -> None:
    """End the engines of replicas, and their servers.

    Args:
        replicas: verl's.
        doors: Those among them that turn requests away, and may go on with that; none by default.
        door_s: For how long; each then ends itself.
    """
    turning = {replica.servers[0]._actor_id for replica in doors}
    asked = []
    for replica in replicas:
        for server in getattr(replica, "servers", []):
            keeps = server._actor_id in turning
            asked.append((server, keeps, apart(server, shutdown, door_s if keeps else None)))
    answers = [answer for _, _, answer in asked]
    if answers:
        ray.wait(answers, num_returns=len(answers), timeout=SHUTDOWN_S)
    for server, keeps, answer in asked:
        if not (_has_ended(answer) and keeps):
            ray.kill(server)


def _has_ended(answer: Any) -> bool:
    """Whether an answer has come that says so; a server that gives no such one is ended too."""
    try:
        ray.get(answer, timeout=0)
    except Exception as error:
        late = isinstance(error, ray.exceptions.GetTimeoutError)
        why = WaitTimeout("the end of its engine", SHUTDOWN_S) if late else error
        _log.warning("a rollout server did not end its engine and is killed: %s", why)
        return False
    return True
