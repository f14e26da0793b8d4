"""Ports: what a rollout engine is to Nereus, and the values that pass between.

An `Engine` is one replica of a model on its devices in one layout. It is made by an
`EngineFactory`, gets its weights (`update_weights`) before its first prompt, and then

    submit -> Handle.future        any number of prompts at once; tokens arrive as they are made
    interrupt                      every prompt in flight ends with the tokens it has
    update_weights                 between prompts: nothing is in flight
    close                          devices are free when it returns

A prompt that was interrupted goes on anywhere as the prompt plus its tokens: `fleet.Fleet` does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from nereus_adapters.rollout.hosts import Hosts
from nereus_adapters.rollout.weights import Manifest
from nereus_core.cluster import Device
from nereus_core.errors import NereusError
from nereus_core.layout import Layout


class EngineError(NereusError):
    """An engine failed at something it was asked for; it is alive, its state may not be whole."""

    def __init__(self, engine: str, doing: str, what: str) -> None:
        self.doing = doing
        super().__init__(f"engine {engine} failed to {doing}: {what}")


class EngineLost(NereusError):
    """An engine is gone, with the process that drove it or one that held a part of it."""

    def __init__(self, engine: str, doing: str, cause: str) -> None:
        super().__init__(f"engine {engine} is gone ({cause}); it was to {doing}.")


class Finish(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """At a token that ends it."""
    LENGTH = "length"
    """At the most tokens asked for, or the longest that the engine takes."""
    INTERRUPTED = "interrupted"
    """Somebody interrupted it, or its engine is gone; it may go on elsewhere."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token each time."""
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response, and belong to it."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued."""

    id: str
    """Unique among the prompts in flight."""
    tokens: tuple[int, ...]
    sampling: Sampling

    def after(self, tokens: Sequence[int]) -> Prompt:
        """Return the prompt that goes on where a response was interrupted.

        Seeded draws go on with another seed: the engine's random state went with the request.
        """
        if not tokens:
            return self
        done, sampling = len(tokens), self.sampling
        seed = None if sampling.seed is None else (sampling.seed + done) % 2**63
        left = replace(sampling, max_tokens=sampling.max_tokens - done, seed=seed)
        return Prompt(self.id, (*self.tokens, *tokens), left)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens that were drawn with one version of the weights."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A response, or as much of it as there is."""

    prompt_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, under the weights that drew it."""
    spans: tuple[Span, ...]
    """Versions in order; their token counts add up."""
    finish: Finish

    def then(self, rest: Completion) -> Completion:
        """Return this response with what was drawn after it."""
        spans = list(self.spans)
        for span in rest.spans:
            if spans and spans[-1].version == span.version:
                spans[-1] = Span(span.version, spans[-1].num_tokens + span.num_tokens)
            else:
                spans.append(span)
        return Completion(
            self.prompt_id,
            self.tokens + rest.tokens,
            self.logprobs + rest.logprobs,
            tuple(spans),
            rest.finish,
        )


@dataclass(frozen=True, slots=True)
class EngineSignals:
    """What an engine has seen since it was last asked."""

    kv_cache_use: float
    """Highest part of the cache in use, in [0, 1]."""
    preemptions: int
    """Requests that were put back because the cache was full."""
    running: int
    """Most requests decoded at once."""
    waiting: int
    """Most requests that waited for room."""
    generated_tokens: int
    busy_s: float
    """Seconds with at least one request."""
    first_token_s: float | None
    """Mean seconds from a request's arrival to its first token; None when none got there."""
    peak_bytes: Mapping[Device, int]
    """Most memory used per device; on a CPU, bytes of the process beyond what it had before."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per busy second."""
        return self.generated_tokens / self.busy_s if self.busy_s > 0 else 0.0


class Engine(Protocol):
    """One replica. Thread-safe; its methods but `submit` wait for the engine's answer.

    They raise EngineLost when the engine is gone, WaitTimeout when it does not answer.
    """

    name: str
    layout: Layout
    devices: tuple[Device, ...]

    @property
    def alive(self) -> bool:
        """Whether all its processes are there."""
        ...

    @property
    def version(self) -> int | None:
        """Of the weights it holds; None before the first, and after an update that failed."""
        ...

    def submit(self, prompt: Prompt) -> Future[Completion]:
        """Begin a response.

        The future always gets a completion: when the engine is lost, one that is INTERRUPTED with
        the tokens that had arrived. It gets EngineError when the engine refuses the prompt.
        """
        ...

    def interrupt(self) -> None:
        """End every response in flight with the tokens it has; returns when all have ended."""
        ...

    def update_weights(self, version: int, manifest: Manifest) -> None:
        """Read the weights that a manifest lists, check their digests, and serve with them.

        Raises:
            EngineError: they could not be read, or a digest differs; the engine must be rebuilt.
        """
        ...

    def signals(self) -> EngineSignals:
        """Return what was seen since the last call."""
        ...

    def close(self) -> None:
        """End it; its devices are free when this returns. Safe to call twice."""
        ...


class EngineFactory(Protocol):
    """Makes engines of one model on the devices there are."""

    def create(self, name: str, layout: Layout, devices: tuple[Device, ...]) -> Engine:
        """Start an engine without weights.

        Raises:
            EngineError: it did not come up; its devices are free.
        """
        ...

    @property
    def healthy(self) -> frozenset[Device]:
        """Devices an engine may be put on."""
        ...

    @property
    def beside(self) -> bool:
        """Whether an engine may be put on a device where another still is, to take its place."""
        ...

    @property
    def hosts(self) -> Hosts:
        """Where its engines read weights."""
        ...

    def problem(self, layout: Layout, devices: tuple[Device, ...]) -> str | None:
        """Say why no engine of a layout can lie on some devices, or None."""
        ...

    def close(self) -> None:
        """End everything it started."""
        ...
