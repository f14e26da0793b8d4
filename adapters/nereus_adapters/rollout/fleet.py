"""Fleet: engines that serve one model, and the prompts in flight on them.

Prompts go to the engine with the least work among those in routing whose weights are current. A
prompt whose engine is interrupted, retired or lost goes on elsewhere with the tokens it has: none
is drawn twice and none is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from nereus_adapters.rollout.ports import (
    Completion,
    Engine,
    EngineError,
    EngineLost,
    EngineSignals,
    Finish,
    Prompt,
)
from nereus_core.errors import WaitTimeout
from nereus_core.units import UnitId

MAX_MOVES = 16
"""Interruptions after which a prompt is given up: something is wrong with it. Chosen,
not measured."""


@dataclass(slots=True, eq=False)
class _Request:
    prompt: Prompt
    future: Future[Completion]
    so_far: Completion
    moves: int = 0

    @property
    def left(self) -> Prompt:
        return self.prompt.after(self.so_far.tokens)


@dataclass(slots=True)
class _Replica:
    engine: Engine
    routed: bool = False
    load: int = 0
    """Tokens that prompts in flight may still ask for."""
    served: set[int] = field(default_factory=set)
    """Versions it has answered with."""


class Fleet:
    """Thread-safe.

    Args:
        wait_s: longest wait for a response before the fleet names who owes it.
    """

    def __init__(self, *, wait_s: float = 600.0) -> None:
        self._wait_s = wait_s
        self._lock = threading.RLock()
        self._ended_one = threading.Condition(self._lock)
        self._replicas: dict[UnitId, _Replica] = {}
        self._waiting: list[_Request] = []
        self.version: int | None = None
        """Of the weights that prompts are answered with."""
        self.moved = 0
        """Prompts that went on elsewhere, ever."""
        self.on_lost: Callable[[UnitId], None] = lambda unit: None
        """Told of an engine that was lost with prompts on it."""

    # --- Replicas ---------------------------------------------------------------------------------

    def add(self, unit: UnitId, engine: Engine) -> None:
        """Take an engine in; it serves once it is routed to."""
        with self._lock:
            self._replicas[unit] = _Replica(engine)

    def route(self, units: Iterable[UnitId]) -> None:
        """Send prompts to these engines and no other, as far as their weights are current (I11)."""
        chosen = set(units)
        with self._lock:
            for unit, replica in self._replicas.items():
                replica.routed = unit in chosen
        self._dispatch()

    def engine(self, unit: UnitId) -> Engine:
        """Return the engine of a unit; raises KeyError."""
        with self._lock:
            return self._replicas[unit].engine

    def engines(self) -> dict[UnitId, Engine]:
        """Return all engines, alive or not."""
        with self._lock:
            return {unit: replica.engine for unit, replica in self._replicas.items()}

    def replace(self, unit: UnitId, engine: Engine) -> None:
        """Put a rebuilt engine in the place of one that was lost or is not whole."""
        with self._lock:
            routed = self._replicas[unit].routed
            self._replicas[unit] = _Replica(engine, routed)
        self._dispatch()

    def remove(self, unit: UnitId, *, drain_s: float = 0.0) -> Engine:
        """Take an engine out, to be closed or handed on.

        What it was doing goes on elsewhere, or ends first where it drains.

        Args:
            unit: whose engine.
            drain_s: longest wait for responses in flight before they are interrupted.
        """
        with self._lock:
            replica = self._replicas[unit]
            replica.routed = False
            if drain_s > 0:
                self._ended_one.wait_for(lambda: replica.load == 0, drain_s)
        # One that does not do it is closed next: that ends them too.
        with suppress(WaitTimeout, EngineError):
            self._interrupt(replica.engine)
        with self._lock:
            del self._replicas[unit]
        return replica.engine

    def interrupt(self) -> None:
        """Stop all engines; prompts wait until some are routed to again.

        Raises:
            WaitTimeout, EngineError: an engine did not do it; the others have.
        """
        with self._lock:
            engines = [r.engine for r in self._replicas.values()]
            for replica in self._replicas.values():
                replica.routed = False
        raise_first(together([lambda e=engine: self._interrupt(e) for engine in engines]))  # type: ignore[misc]

    def serve_version(self, version: int | None) -> None:
        """Answer with this version from now on."""
        with self._lock:
            self.version = version
        self._dispatch()

    def signals(self) -> dict[UnitId, EngineSignals]:
        """Return what engines have seen since the last call; those lost are left out."""
        found = {}
        for unit, engine in self.engines().items():
            try:
                found[unit] = engine.signals()
            except EngineLost:
                continue
        return found

    def served(self) -> dict[UnitId, int]:
        """Return the newest version that each engine has answered with, and forget."""
        with self._lock:
            found = {u: max(r.served) for u, r in self._replicas.items() if r.served}
            for replica in self._replicas.values():
                replica.served = set()
        return found

    # --- Prompts ----------------------------------------------------------------------------------

    def submit(self, prompt: Prompt) -> Future[Completion]:
        """Begin a response; it waits while no engine is in routing."""
        nothing = Completion(prompt.id, (), (), (), Finish.INTERRUPTED)
        request = _Request(prompt, Future(), nothing)
        self._begin(request)
        return request.future

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Respond to prompts, in their order.

        Raises:
            WaitTimeout: one was not answered in time; names it and the engines in routing.
            EngineError: an engine refused one.
        """
        futures = [self.submit(prompt) for prompt in prompts]
        deadline_s = time.monotonic() + self._wait_s
        found = []
        for prompt, future in zip(prompts, futures, strict=True):
            try:
                found.append(future.result(max(0.0, deadline_s - time.monotonic())))
            except TimeoutError:
                raise WaitTimeout(
                    f"the response to {prompt.id} from {self._names()}", self._wait_s
                ) from None
        return found

    def _begin(self, request: _Request) -> None:
        with self._lock:
            chosen = self._least()
            if chosen is None:
                self._waiting.append(request)
                return
            prompt = request.left
            cost = prompt.sampling.max_tokens
            chosen.load += cost
        part = chosen.engine.submit(prompt)
        part.add_done_callback(lambda done: self._ended(request, chosen, cost, done))

    def _least(self) -> _Replica | None:
        able = [
            r
            for r in self._replicas.values()
            if r.routed and r.engine.alive and r.engine.version == self.version is not None
        ]
        return min(able, key=lambda r: r.load / r.engine.layout.num_devices, default=None)

    def _ended(
        self, request: _Request, replica: _Replica, cost: int, done: Future[Completion]
    ) -> None:
        error = done.exception()
        with self._lock:
            replica.load -= cost
            self._ended_one.notify_all()
        if error is not None:
            request.future.set_exception(error)
            return
        part = done.result()
        with self._lock:
            replica.served |= {span.version for span in part.spans}
        request.so_far = request.so_far.then(part)
        if part.finish is not Finish.INTERRUPTED:
            request.future.set_result(request.so_far)
            return
        request.moves += 1
        self.moved += 1
        if request.moves > MAX_MOVES:
            request.future.set_exception(
                EngineError(replica.engine.name, f"respond to {request.prompt.id}", "given up")
            )
            return
        try:
            if not replica.engine.alive:
                self._tell_lost(replica)
        finally:
            self._begin(request)

    def _tell_lost(self, replica: _Replica) -> None:
        with self._lock:
            found = [unit for unit, r in self._replicas.items() if r is replica]
        for unit in found:
            self.on_lost(unit)

    def _dispatch(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._begin(request)

    def _interrupt(self, engine: Engine) -> None:
        try:
            engine.interrupt()
        except EngineLost:
            return  # its responses have ended with it

    def _names(self) -> str:
        with self._lock:
            routed = [r.engine.name for r in self._replicas.values() if r.routed]
        return ", ".join(routed) or "no engine: none is in routing"


def together(calls: Sequence[Callable[[], object]]) -> list[BaseException | None]:
    """Run calls at once; return what each raised."""
    if not calls:
        return []
    with ThreadPoolExecutor(len(calls), thread_name_prefix="nereus engines") as threads:
        return [future.exception() for future in [threads.submit(call) for call in calls]]


def raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise the first error there is."""
    for error in errors:
        if error is not None:
            raise error
