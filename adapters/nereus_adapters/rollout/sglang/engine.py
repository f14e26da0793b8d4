"""SglangEngine: the driver's end of one engine process. Implements `ports.Engine`."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from nereus_adapters.rollout.ports import (
    Completion,
    EngineError,
    EngineLost,
    EngineSignals,
    Finish,
    Prompt,
    Sampling,
    Span,
)
from nereus_adapters.rollout.sglang.calls import Call
from nereus_adapters.rollout.sglang.loading import load
from nereus_adapters.rollout.sglang.pool import Leased, StemPool
from nereus_adapters.rollout.weights import GarbledWeights, Manifest
from nereus_core.cluster import Device
from nereus_core.errors import WaitTimeout
from nereus_core.layout import Layout

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.INTERRUPTED}
"""SGLang's finish reasons (managers/schedule_batch.py) as ours."""


@dataclass(slots=True)
class _Response:
    prompt: Prompt
    version: int
    future: Future[Completion] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def ended(self, finish: Finish) -> Completion:
        spans = (Span(self.version, len(self.tokens)),) if self.tokens else ()
        return Completion(self.prompt.id, tuple(self.tokens), tuple(self.logprobs), spans, finish)


class SglangEngine:
    """One replica on `sglang.Engine`.

    Args:
        leased: its process.
        pool: what ends the process.
        wait_s: longest wait for an answer.
        start_s: longest wait until it serves.

    Raises:
        EngineError: it did not come up; its devices are free.
    """

    def __init__(
        self,
        leased: Leased,
        pool: StemPool,
        layout: Layout,
        devices: tuple[Device, ...],
        *,
        wait_s: float,
        start_s: float,
    ) -> None:
        self.name, self.layout, self.devices = leased.name, layout, devices
        self._leased, self._pool, self._wait_s = leased, pool, wait_s
        self._lock = threading.RLock()
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._ids = itertools.count()
        self._responses: dict[str, _Response] = {}
        self._version: int | None = None
        self._served = False
        """Whether it ever had weights."""
        self._alive, self._ended = True, False
        self._ending = threading.Lock()
        self.pids: tuple[int, ...] = ()
        """Of its rank processes, in order of rank."""
        self.start_s = 0.0
        """Seconds from the fork until it served."""
        self._ready: Future[None] = Future()
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"engine {self.name}")
        self._reader.start()
        try:
            self._ready.result(start_s)
        except FutureTimeout:
            self.close()
            raise WaitTimeout(f"engine {self.name} to come up", start_s) from None
        except EngineLost as error:
            self.close()
            raise EngineError(self.name, "come up", pool.log_end()) from error

    @property
    def pid(self) -> int:
        """Of the engine process; its ranks are in its process group."""
        return self._leased.pid

    @property
    def alive(self) -> bool:
        """Whether its processes are there: they end together."""
        return self._alive

    @property
    def version(self) -> int | None:
        """Of its weights."""
        return self._version

    # --- Responses --------------------------------------------------------------------------------

    def submit(self, prompt: Prompt) -> Future[Completion]:
        """Begin a response."""
        with self._lock:
            response = _Response(prompt, -1 if self._version is None else self._version)
            if not self._alive:  # first: one that has ended has no version either
                response.future.set_result(response.ended(Finish.INTERRUPTED))
                return response.future
            if self._version is None and self._served:
                # Its weights are on their way: whoever chose it did so a moment before.
                response.future.set_result(response.ended(Finish.INTERRUPTED))
                return response.future
            if self._version is None:
                response.future.set_exception(
                    EngineError(self.name, f"respond to {prompt.id}", "it has no weights")
                )
                return response.future
            self._responses[prompt.id] = response
            arguments = {
                "prompt_id": prompt.id,
                "tokens": list(prompt.tokens),
                "sampling": _sampling(prompt.sampling),
            }
            self._send((-1, "submit", arguments))
        return response.future

    def drawn(self, prompt_id: str) -> tuple[int, ...]:
        """Return the tokens that a response in flight has so far; none when it has ended."""
        with self._lock:
            response = self._responses.get(prompt_id)
            return () if response is None else tuple(response.tokens)

    def interrupt(self) -> None:
        """End every response in flight with the tokens it has."""
        self.call("interrupt", timeout_s=self._wait_s)
        # Every response said that it has ended before the answer came, on the same connection.

    # --- Weights ----------------------------------------------------------------------------------

    def update_weights(self, version: int, manifest: Manifest) -> None:
        """Let each rank read its pieces of a manifest, when nothing is in flight."""
        with self._lock:
            self._version = None
        if self._served:
            self.interrupt()
        self.call_ranks(Call(load, manifest))
        self._version, self._served = version, True

    def begin_receiving(self) -> None:
        """Be ready for weights from groups; it has no version until `end_receiving`."""
        with self._lock:
            self._version = None
        if self._served:
            self.interrupt()
        self.call("begin_receiving")

    def end_receiving(self, version: int) -> None:
        """Serve with what was received, as a version."""
        self.call("end_receiving")
        self._version, self._served = version, True

    # --- Looking ----------------------------------------------------------------------------------

    def call_ranks(self, call: Call) -> list[Any]:
        """Let every rank do something with its model while nothing is in flight."""
        found: list[Any] = self.call("call_ranks", call=pickle.dumps(call), timeout_s=self._wait_s)
        return found

    def signals(self) -> EngineSignals:
        """Return what was seen since the last call."""
        found = self.call("signals")
        peaks = dict(zip(self.devices, found.pop("peak_bytes"), strict=True))
        return EngineSignals(**found, peak_bytes=peaks)

    def close(self) -> None:
        """End it."""
        self._end()
        self._reader.join(self._wait_s)

    def _end(self) -> None:
        with self._ending:
            if not self._ended:
                self._pool.end(self._leased, self.pids)
                self._ended = True

    # --- The connection ---------------------------------------------------------------------------

    def call(self, method: str, **arguments: object) -> Any:
        """Ask the engine process and wait for its answer."""
        return self.answer(method, self.begin(method, **arguments))

    def begin(self, method: str, **arguments: object) -> Future[Any]:
        """Ask the engine process."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._alive:
                raise EngineLost(self.name, method, "its process had ended")
            call_id = next(self._ids)
            self._calls[call_id] = (method, future)
            self._send((call_id, method, arguments))
        return future

    def answer(self, method: str, future: Future[Any]) -> Any:
        """Wait for what `begin` asked for."""
        try:
            return future.result(self._wait_s)
        except FutureTimeout:
            raise WaitTimeout(f"engine {self.name} to {method}", self._wait_s) from None

    def _send(self, message: object) -> None:
        try:
            self._leased.connection.send(message)
        except OSError:
            return  # its process has ended: the reader is about to see it

    def _read(self) -> None:
        while True:
            try:
                kind, *message = self._leased.connection.recv()
            except (EOFError, OSError):
                break
            getattr(self, f"_on_{kind}")(*message)
        self._bury()

    def _on_ready(self, pids: Sequence[int], start_s: float) -> None:
        self.pids, self.start_s = tuple(pids), start_s
        self._ready.set_result(None)

    def _on_tokens(self, prompt_id: str, tokens: list[int], logprobs: list[float]) -> None:
        response = self._responses[prompt_id]
        response.tokens += tokens
        response.logprobs += logprobs

    def _on_done(self, prompt_id: str, why: str) -> None:
        response = self._taken(prompt_id)
        response.future.set_result(response.ended(_FINISH[why]))

    def _on_refused(self, prompt_id: str, what: str) -> None:
        error = EngineError(self.name, f"respond to {prompt_id}", what)
        self._taken(prompt_id).future.set_exception(error)

    def _on_answer(self, call_id: int, value: object) -> None:
        self._calls.pop(call_id)[1].set_result(value)

    def _on_failed(self, call_id: int, kind: str, text: str) -> None:
        method, future = self._calls.pop(call_id)
        error = EngineError(self.name, method, f"{kind}: {text}")
        future.set_exception(_garbled(error) if kind == "Garbled" else error)

    def _taken(self, prompt_id: str) -> _Response:
        with self._lock:
            return self._responses.pop(prompt_id)

    def _bury(self) -> None:
        with self._lock:
            self._alive, self._version = False, None
            self._leased.connection.close()  # here: nobody reads it any more, nor writes to it now
            calls, self._calls = self._calls, {}
            responses, self._responses = self._responses, {}
        for response in responses.values():
            response.future.set_result(response.ended(Finish.INTERRUPTED))
        for method, future in calls.values():
            future.set_exception(EngineLost(self.name, method, "its process ended"))
        if not self._ready.done():
            self._ready.set_exception(EngineLost(self.name, "come up", "its process ended"))
        self._end()  # at once: later, its process id may be another's


def _garbled(error: EngineError) -> GarbledWeights:
    """Return the error of a digest that differs, in a rank's words."""
    found = GarbledWeights.__new__(GarbledWeights)
    found.args = (str(error),)
    return found


def _sampling(wanted: Sampling) -> dict[str, Any]:
    return {
        "max_new_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "stop_token_ids": list(wanted.stop_ids),
        "sampling_seed": wanted.seed,
    }
