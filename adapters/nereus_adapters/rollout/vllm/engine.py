"""VllmEngine: one vLLM engine on its seats, as the rollout ports say it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from nereus_adapters.rollout.ports import (
    Completion,
    EngineError,
    EngineLost,
    EngineSignals,
    Finish,
    Prompt,
    Span,
)
from nereus_adapters.rollout.vllm.seats import SeatError, SeatProcess
from nereus_adapters.rollout.vllm.settings import VllmSettings
from nereus_adapters.rollout.vllm.values import FINISHES, Drawn, Seen
from nereus_adapters.rollout.weights import GarbledWeights, Manifest
from nereus_core.cluster import Device
from nereus_core.errors import SeatDead, WaitTimeout
from nereus_core.layout import Layout


@dataclass(slots=True, eq=False)
class _InFlight:
    prompt: Prompt
    future: Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = -1

    def completion(self, finish: Finish) -> Completion:
        spans = (Span(self.version, len(self.tokens)),) if self.tokens else ()
        return Completion(self.prompt.id, tuple(self.tokens), tuple(self.logprobs), spans, finish)


class VllmEngine:
    """One vLLM engine. Implements `nereus_adapters.rollout.ports.Engine`."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        devices: tuple[Device, ...],
        lead: SeatProcess,
        seats: tuple[SeatProcess, ...],
        settings: VllmSettings,
        on_closed: Callable[[VllmEngine, bool], None],
    ) -> None:
        self.name, self.layout, self.devices = name, layout, devices
        self._settings, self._on_closed = settings, on_closed
        self._lead = lead
        self.processes = tuple(dict.fromkeys((lead, *seats)))
        """The one that leads, and seats with ranks: those of vLLM's own workers are not listed."""
        self._lock = threading.RLock()
        self._in_flight: dict[str, _InFlight] = {}
        self._count = 0
        self._version: int | None = None
        self._lost: str | None = None
        self._closed = False
        self._updating = False
        self._lead.on_drawn = self._drawn
        for seat in self.processes:
            seat.on_broken = self.broken

    @property
    def alive(self) -> bool:
        """Whether all its seats are there and no step has failed."""
        return self._lost is None and not self._closed and all(p.alive for p in self.processes)

    @property
    def version(self) -> int | None:
        """Of its weights."""
        return self._version

    # --- Prompts ----------------------------------------------------------------------------------

    def submit(self, prompt: Prompt) -> Future[Completion]:
        """Begin a response."""
        future: Future[Completion] = Future()
        entry = _InFlight(prompt, future)
        sampling = prompt.sampling
        request = {
            "tokens": prompt.tokens,
            "sampling": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "seed": sampling.seed,
                "stop_token_ids": list(sampling.stop_ids),
                # What ends a response is the caller's to say, not the model's folder's.
                "ignore_eos": True,
            },
        }
        key = None
        with self._lock:
            if self._lost is None and not self._closed and not self._updating:
                self._count += 1
                key = f"{prompt.id}/{self._count}"
                self._in_flight[key] = entry
                # Sent with the lock held: an interrupt that lists it is sent after it. It does not
                # wait for the seat.
                sent = self._lead.send("submit", requests=[{"id": key, **request}])
        if key is None:
            future.set_result(entry.completion(Finish.INTERRUPTED))
        else:
            sent.add_done_callback(lambda done: self._submitted(key, done))
        return future

    def _submitted(self, key: str, done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, SeatDead):
            return  # `broken` has heard
        refused = {key: str(error)} if error is not None else done.result()
        for name, why in refused.items():
            with self._lock:
                entry = self._in_flight.pop(name, None)
            if entry is not None:
                doing = f"respond to {entry.prompt.id}"
                entry.future.set_exception(EngineError(self.name, doing, why))

    def _drawn(self, drawn: list[Drawn]) -> None:
        ended: list[tuple[_InFlight, Finish]] = []
        with self._lock:
            for part in drawn:
                entry = self._in_flight.get(part.request)
                if entry is None:
                    continue
                entry.tokens += part.tokens
                entry.logprobs += part.logprobs
                entry.version = part.version
                if part.reason is not None:
                    del self._in_flight[part.request]
                    ended.append((entry, FINISHES[part.reason]))
        for entry, finish in ended:
            entry.future.set_result(entry.completion(finish))

    def interrupt(self) -> None:
        """End every response in flight."""
        with self._lock:
            keys = list(self._in_flight)
        if not keys:
            return
        try:
            self._call("interrupt", self._settings.call_s, "interrupt", ids=keys)
        finally:
            self._end(keys)

    def _end(self, keys: list[str]) -> None:
        with self._lock:
            entries = [e for e in (self._in_flight.pop(key, None) for key in keys) if e]
        for entry in entries:
            entry.future.set_result(entry.completion(Finish.INTERRUPTED))

    def broken(self, why: str) -> None:
        """Take note that the engine is gone; responses end with what has arrived of them."""
        with self._lock:
            if self._closed:
                return
            self._lost = self._lost or why
            self._version = None
            keys = list(self._in_flight)
        if any(not process.alive for process in self.processes):
            # The others may wait for it in a collective that never ends: so may whoever asks them.
            for process in self.processes:
                process.process.kill()
        self._end(keys)

    # --- Weights ----------------------------------------------------------------------------------

    def update_weights(self, version: int, manifest: Manifest) -> None:
        """Check digests while the old weights serve on, then load."""
        call_s = self._settings.start_s
        doing = f"check weights version {version}"
        try:
            self._call("check", call_s, doing, manifest=manifest)
        except EngineError as error:
            raise _garbled(error) or error from error
        with self._lock:
            self._version, self._updating = None, True
        self.interrupt()
        self._call("update", call_s, f"load weights version {version}", manifest=manifest)
        # Not after a failure: a part of the weights may be of this version, a part of the last.
        with self._lock:
            self._version, self._updating = version, False

    # --- The rest ---------------------------------------------------------------------------------

    def signals(self) -> EngineSignals:
        """Return what was seen since the last call."""
        seen: Seen = self._call("signals", self._settings.call_s, "say what it has seen")
        return EngineSignals(
            kv_cache_use=seen.kv_cache_use,
            preemptions=seen.preemptions,
            running=seen.running,
            waiting=seen.waiting,
            generated_tokens=seen.generated_tokens,
            busy_s=seen.busy_s,
            first_token_s=seen.first_token_s,
            peak_bytes=dict(zip(self.devices, seen.peak_bytes, strict=True)),
        )

    def rpc(self, method: str, **kwargs: object) -> list[Any]:
        """Run a method of the worker extension on all ranks; results by local rank."""
        found: list[Any] = self._call(
            "rpc", self._settings.call_s, method, method=method, kwargs=kwargs
        )
        return found

    def close(self) -> None:
        """Give the seats back."""
        with self._lock:
            if self._closed:
                return
            clean = self.alive
            self._closed = True
            keys = list(self._in_flight)
        if clean:
            try:
                self._lead.call("stop", self._settings.call_s)
            except (SeatDead, SeatError, WaitTimeout):
                clean = False
        self._end(keys)
        self._on_closed(self, clean)

    def _call(self, call: str, timeout_s: float, doing: str, /, **kwargs: object) -> Any:
        if self._lost is not None:
            raise EngineLost(self.name, doing, self._lost)
        try:
            return self._lead.call(call, timeout_s, **kwargs)
        except SeatDead as error:
            raise EngineLost(self.name, doing, str(error)) from error
        except WaitTimeout as error:
            self.broken(str(error))
            raise
        except SeatError as error:
            raise EngineError(self.name, doing, str(error)) from error


def _garbled(error: EngineError) -> GarbledWeights | None:
    """Rebuild the error of a digest that differs, from a seat's words."""
    cause = error.__cause__
    words = str(cause) if isinstance(cause, SeatError) else ""
    if GarbledWeights.__name__ not in words and "another digest" not in words:
        return None
    return GarbledWeights.said(words)
