"""What crosses between the driver and a seat: plain values, without torch or vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nereus_adapters.rollout.ports import Finish

BROKEN = -2
"""Id of the reply that says that an engine cannot go on."""
DRIVER, LEADER = "driver", "leader"
"""What whoever connects to a seat says first: whose calls are to follow."""
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.INTERRUPTED}
"""vLLM's words for the ends of a response; any other is an error."""


@dataclass(frozen=True, slots=True)
class Boot:
    """What the stem is told when it starts."""

    secret: str
    """Of the pool, in hex."""
    driver: int
    """Process id; seats end when it has."""
    accelerator: str
    """``cpu`` or ``cuda``."""
    folder: str
    """Of the pool: sockets and logs; the stem removes it should the driver not have done it."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A seat to be forked."""

    address: str
    """Of its socket."""
    log: str
    """File that its output goes to."""
    front: bool = False
    """Whether it is to be the front of one engine instead."""


@dataclass(frozen=True, slots=True)
class Call:
    """A method for a seat to run."""

    id: int
    method: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a call."""

    id: int
    value: Any = None
    error: str | None = None
    """Its last line, or None."""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that a request got in one step."""

    request: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    reason: str | None
    """Why it ended, in vLLM's word; None when it goes on."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An engine's figures; peaks by rank."""

    kv_cache_use: float
    preemptions: int
    running: int
    waiting: int
    generated_tokens: int
    busy_s: float
    first_token_s: float | None
    peak_bytes: tuple[int, ...] = field(default_factory=tuple)
