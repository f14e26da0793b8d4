"""draining: what an asynchronous trainer has under way when its ``fit`` is ended; for the harness.

Its agent loops wait at the servers' closed gates, and outlive it. They are let finish before the
next ``fit``, which would ask again for every prompt that verl's transfer queue says is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nereus_adapters.verl.waiting import until

_TRAIN = "train"
"""verl's name for what is trained on, in its transfer queue."""
_UNDER_WAY = ("pending", "running")


def drain(open_servers: Callable[[], object], timeout_s: float) -> None:
    """Let the rollout answer all that it was asked.

    Args:
        open_servers: gives them weights, and opens their gates.
        timeout_s: for the answers.

    Raises:
        WaitTimeout: some are still under way then.
    """
    open_servers()
    until(
        lambda: not any(map(_is_under_way, _tags().values())),
        "prompts under way to be answered",
        timeout_s,
    )


def forget() -> None:
    """Clear what the transfer queue has for training; nobody writes to it any more."""
    import transfer_queue

    if keys := list(_tags()):
        transfer_queue.kv_clear(keys=keys, partition_id=_TRAIN)


def _tags() -> Mapping[str, Mapping[str, Any]]:
    import transfer_queue

    found: Mapping[str, Mapping[str, Any]] = (transfer_queue.kv_list(_TRAIN) or {}).get(_TRAIN, {})
    return found


def _is_under_way(tag: Mapping[str, Any]) -> bool:
    return bool(tag.get("is_prompt", False)) and tag["status"] in _UNDER_WAY
