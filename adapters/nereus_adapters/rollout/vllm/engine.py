"""VllmEngine and VllmFactory: the rollout ports on seats that run vLLM."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nereus_adapters.rollout.ports import (
    Completion,
    EngineError,
    EngineLost,
    EngineSignals,
    Finish,
    Prompt,
    Span,
)
from nereus_adapters.rollout.segment import FOLDER, remove
from nereus_adapters.rollout.vllm.seats import SeatError, SeatPool, SeatProcess
from nereus_adapters.rollout.vllm.values import FINISHES, Drawn, Seen
from nereus_adapters.rollout.weights import GarbledWeights, Manifest
from nereus_core.cluster import Device
from nereus_core.errors import SeatDead, WaitTimeout
from nereus_core.layout import Layout, layer_ranges
from nereus_core.model import ModelSpec

EXTENSION = "nereus_adapters.rollout.vllm.hosting.Extension"
CPU_ENV = {
    # Threads are the operating system's business where several seats share a machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""What vLLM calls the families of `nereus_core.model`; a config.json need not say it."""
SEAT_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How engines are started."""

    model: Path
    """Folder with a config.json; its weights are not read."""
    dtype: str = "float32"
    max_tokens: int = 2048
    """Longest prompt and response together (vLLM's max_model_len)."""
    max_running: int = 64
    """Most requests decoded at once (vLLM's max_num_seqs)."""
    kv_cache_bytes: int | None = None
    """Per device; None lets vLLM take what it is allowed to."""
    eager: bool = False
    """Whether vLLM compiles nothing: starts faster, decodes slower."""
    executor: Literal["seats", "uni", "mp", "ray"] = "seats"
    """Who runs the ranks: seats that stay, or vLLM's own workers, started with each engine (``uni``
    is one rank in the process of the engine, ``mp`` processes of this host, ``ray`` actors)."""
    extension: str = EXTENSION
    """Worker extension class: this one or a subclass."""
    start_s: float = 180.0
    """Longest wait for an engine to start, and for a seat."""
    call_s: float = 60.0
    """Longest wait for an engine's answer."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments of vLLM's own, which win."""


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
        seats: tuple[SeatProcess, ...],
        settings: VllmSettings,
        on_closed: Callable[[VllmEngine, bool], None],
    ) -> None:
        self.name, self.layout, self.devices = name, layout, devices
        self._seats, self._settings, self._on_closed = seats, settings, on_closed
        self._lead = seats[0]
        self._lock = threading.RLock()
        self._in_flight: dict[str, _InFlight] = {}
        self._count = 0
        self._version: int | None = None
        self._lost: str | None = None
        self._closed = False
        self._lead.on_drawn = self._drawn
        for seat in seats:
            seat.on_broken = self._broken

    @property
    def alive(self) -> bool:
        """Whether all its seats are there and no step has failed."""
        return self._lost is None and not self._closed and all(s.alive for s in self._seats)

    @property
    def version(self) -> int | None:
        """Of its weights."""
        return self._version

    # --- Prompts ----------------------------------------------------------------------------------

    def submit(self, prompt: Prompt) -> Future[Completion]:
        """Begin a response."""
        future: Future[Completion] = Future()
        entry = _InFlight(prompt, future)
        with self._lock:
            if self._lost is not None or self._closed:
                key = None
            else:
                self._count += 1
                key = f"{prompt.id}/{self._count}"
                self._in_flight[key] = entry
        if key is None:
            future.set_result(entry.completion(Finish.INTERRUPTED))
            return future
        sampling = prompt.sampling
        request = {
            "id": key,
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
        sent = self._lead.send("submit", requests=[request])
        sent.add_done_callback(lambda done: self._submitted(key, done))
        return future

    def _submitted(self, key: str, done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, SeatDead):
            return  # `_broken` has heard
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

    def _broken(self, why: str) -> None:
        """Take note that the engine is gone; responses end with what has arrived of them."""
        with self._lock:
            if self._closed:
                return
            self._lost = self._lost or why
            self._version = None
            keys = list(self._in_flight)
        if any(not seat.alive for seat in self._seats):
            # The others may wait for it in a collective that never ends: so may whoever asks them.
            for seat in self._seats:
                seat.process.kill()
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
        self.interrupt()
        self._version = None
        self._call("update", call_s, f"load weights version {version}", manifest=manifest)
        self._version = version

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
            self._broken(str(error))
            raise
        except SeatError as error:
            raise EngineError(self.name, doing, str(error)) from error


def _garbled(error: EngineError) -> GarbledWeights | None:
    """Rebuild the error of a digest that differs, from a seat's words."""
    cause = error.__cause__
    words = str(cause) if isinstance(cause, SeatError) else ""
    if GarbledWeights.__name__ not in words and "another digest" not in words:
        return None
    rebuilt = GarbledWeights.__new__(GarbledWeights)
    rebuilt.args = (words,)
    return rebuilt


class VllmFactory:
    """Engines of one model on the seats of one host.

    Implements `nereus_adapters.rollout.ports.EngineFactory`.

    Args:
        settings: how engines are started.
        model: shapes.
        devices: of this host; a seat is forked for each when it is first needed.
        accelerator: what devices are.
        recycle_bytes: a seat that has grown by more is replaced between two engines; None: never.
        pool: seats of somebody else, who closes them.
    """

    def __init__(
        self,
        settings: VllmSettings,
        model: ModelSpec,
        devices: tuple[Device, ...],
        *,
        accelerator: Literal["cpu", "cuda"] = "cpu",
        recycle_bytes: int | None = None,
        pool: SeatPool | None = None,
    ) -> None:
        self._settings, self._model, self._devices = settings, model, devices
        self._recycle_bytes = recycle_bytes
        env = {**SEAT_ENV, **(CPU_ENV if accelerator == "cpu" else {})}
        self._owns_pool = pool is None
        self.pool = pool or SeatPool(accelerator, env)
        self._ports: dict[str, int] = {}
        self._shared: dict[str, set[str]] = {}
        self._base_bytes: dict[Device, int] = {}
        self.recycled = 0
        """Seats that were replaced because they had grown."""

    @property
    def healthy(self) -> frozenset[Device]:
        """Devices whose seats answer, or that have not needed one yet."""
        return frozenset(self._devices)

    def create(self, name: str, layout: Layout, devices: tuple[Device, ...]) -> VllmEngine:
        """Start an engine: its first device leads, the others follow."""
        settings = self._settings
        leased = settings.executor == "seats"
        mine = devices if leased else devices[:1]
        if not leased and devices[0] in self.pool.alive:
            self.pool.renew(devices[0])  # a stock engine starts in a process of its own
        if len(set(devices)) != len(devices):
            raise EngineError(name, "start", f"a device is listed twice: {list(map(str, devices))}")
        self.pool.start(mine)
        seats = tuple(self.pool.seat(device) for device in mine)
        port = _free_port()
        env: dict[str, str | None] = {"VLLM_PP_LAYER_PARTITION": None}
        if layout.pp > 1:
            runs = layer_ranges(self._model.num_layers, layout.pp)
            env["VLLM_PP_LAYER_PARTITION"] = ",".join(str(len(run)) for run in runs)
        args = self._arguments(layout, devices, port, env)
        engine = VllmEngine(name, layout, devices, seats, settings, self._closed)
        self._ports[name] = port
        try:
            seats[0].call("start", settings.start_s, args=args, env=env, secret=self.pool.secret)
        except (SeatDead, SeatError, WaitTimeout) as error:
            engine._broken(str(error))
            engine.close()
            raise EngineError(name, "start", str(error)) from error
        if leased and layout.num_devices > 1:
            self._shared[name] = {n for names in engine.rpc("nereus_shared") for n in names}
        return engine

    def _arguments(
        self,
        layout: Layout,
        devices: tuple[Device, ...],
        port: int,
        env: Mapping[str, str | None],
    ) -> dict[str, Any]:
        settings = self._settings
        args: dict[str, Any] = {
            "model": str(settings.model),
            "load_format": "dummy",
            "dtype": settings.dtype,
            "max_model_len": settings.max_tokens,
            "max_num_seqs": settings.max_running,
            "kv_cache_memory_bytes": settings.kv_cache_bytes,
            "enforce_eager": settings.eager,
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "worker_extension_cls": settings.extension,
            "hf_overrides": {"architectures": [_ARCHITECTURES[self._model.family]]},
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "disable_log_stats": False,
            "seed": 0,
        }
        if settings.executor == "seats":
            args["additional_config"] = {
                "nereus": {
                    "followers": [(f"seat {d}", self.pool.address(d)) for d in devices[1:]],
                    "local_ranks": [d.index for d in devices],
                    "host": "127.0.0.1",
                    "port": port,
                    "timeout_s": settings.call_s,
                    "env": dict(env),
                }
            }
        else:
            args["distributed_executor_backend"] = settings.executor
        return {**args, **settings.more}

    def _closed(self, engine: VllmEngine, clean: bool) -> None:
        """Take an engine's seats back: those that may be stuck are replaced."""
        if not clean:
            for seat in engine._seats:
                if seat.alive:
                    seat.kill()
        _sweep(self._ports.pop(engine.name, None))
        remove(self._shared.pop(engine.name, ()))
        if clean and self._settings.executor == "seats":
            self._recycle(engine.devices)

    def _recycle(self, devices: tuple[Device, ...]) -> None:
        """Replace seats that have grown by more than `recycle_bytes` since their first engine."""
        if self._recycle_bytes is None:
            return
        for device in devices:
            resident, _ = self.pool.seat(device).call("memory", self._settings.call_s)
            base = self._base_bytes.setdefault(device, resident)
            if resident - base > self._recycle_bytes:
                del self._base_bytes[device]
                self.pool.renew(device)
                self.recycled += 1

    def close(self) -> None:
        """End all seats, unless the pool is somebody else's."""
        if self._owns_pool:
            self.pool.close()
        for port in self._ports.values():
            _sweep(port)


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _sweep(port: int | None) -> None:
    """Remove shared memory that vLLM's CPU groups of one engine left: they carry its port."""
    if port is None:
        return
    for path in FOLDER.iterdir():
        if path.name.startswith(f"{port}-") and "cpushm" in path.name:
            path.unlink(missing_ok=True)
