"""turning: replicas that leave stop what they generate and turn requests away from then on.

verl's client takes what each request has so far to another replica, which goes on from there.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from nereus_adapters.ray_calls import inside
from nereus_adapters.verl.inside_server import let_go, unanswered

_log = logging.getLogger("nereus")
POLL_S = 0.05
"""Between looks at what a server still has to answer. Chosen, not measured."""


async def turned_away(replicas: Sequence[Any], limit_s: float) -> list[Any]:
    """Let the requests of replicas go; one that hangs keeps no other from it.

    Args:
        replicas: verl's, whom the balancer does not name any more.
        limit_s: For each.

    Returns:
        Those at which no request waits, and none that comes will.
    """
    tries = (asyncio.wait_for(_turn_away(replica), limit_s) for replica in replicas)
    answers = await asyncio.gather(*tries, return_exceptions=True)
    for replica, answer in zip(replicas, answers, strict=True):
        if isinstance(answer, BaseException):
            late = isinstance(answer, TimeoutError)
            why = f"not within {limit_s:g} s" if late else f"{type(answer).__name__}: {answer}"
            _log.warning(
                "rollout replica %s did not let its requests go and is ended with them: %s",
                replica.replica_rank,
                why,
            )
    return [r for r, answer in zip(replicas, answers, strict=True) if answer is True]


async def _turn_away(replica: Any) -> bool:
    known = inspect.signature(replica.abort_all_requests).parameters
    # verl 0.9.0 has no such word: a request that waits fails, and its prompt with it.
    await replica.abort_all_requests(
        **({"reject_request": True} if "reject_request" in known else {})
    )
    turns = bool(await inside(replica.servers[0], let_go))
    while await inside(replica.servers[0], unanswered):
        await asyncio.sleep(POLL_S)
    return turns
