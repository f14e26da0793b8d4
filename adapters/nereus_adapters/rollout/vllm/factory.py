"""VllmFactory: engines on the seats of one host, started, ended and cleared away."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any, Literal

from nereus_adapters.rollout.ports import EngineError, EngineLost
from nereus_adapters.rollout.vllm.engine import VllmEngine
from nereus_adapters.rollout.vllm.seats import SeatError, SeatPool, SeatProcess
from nereus_adapters.rollout.vllm.settings import ARCHITECTURES, CPU_ENV, SEAT_ENV, VllmSettings
from nereus_adapters.rollout.vllm.shared import SHARED_MEMORY
from nereus_core.cluster import Device
from nereus_core.errors import ConfigError, SeatDead, WaitTimeout
from nereus_core.layout import Layout, layer_ranges
from nereus_core.model import ModelSpec


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

    Raises:
        ConfigError: the settings do not go together.
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
        if settings.front == "async" and settings.executor != "seats":
            what = f"is for seats; vLLM's own {settings.executor!r} executor is stepped by its seat"
            raise ConfigError("backend.vllm.front", f"'async' {what}")
        self._settings, self._model, self._devices = settings, model, devices
        self._recycle_bytes = recycle_bytes
        env = {**SEAT_ENV, **(CPU_ENV if accelerator == "cpu" else {})}
        self._owns_pool = pool is None
        self.pool = pool or SeatPool(accelerator, env)
        self._ports: dict[str, int] = {}
        self._base_bytes: dict[Device, int] = {}
        self.recycled = 0
        """Seats that were replaced because they had grown."""

    @property
    def healthy(self) -> frozenset[Device]:
        """Devices whose seats answer, or that have not needed one yet."""
        return frozenset(self._devices)

    @property
    def beside(self) -> bool:
        """Whether an engine may be put on a device where another still is: a seat has one rank."""
        return False

    def create(self, name: str, layout: Layout, devices: tuple[Device, ...]) -> VllmEngine:
        """Start an engine: its first device leads, the others follow."""
        settings = self._settings
        leased = settings.executor == "seats"
        fronted = settings.front == "async"
        mine = devices if leased else devices[:1]
        if not leased and devices[0] in self.pool.alive:
            self.pool.renew(devices[0])  # a stock engine starts in a process of its own
        if len(set(devices)) != len(devices):
            raise EngineError(name, "start", f"a device is listed twice: {list(map(str, devices))}")
        self.pool.start(mine)
        seats = tuple(self.pool.seat(device) for device in mine)
        port = free_port()
        env: dict[str, str | None] = {"VLLM_PP_LAYER_PARTITION": None}
        if layout.pp > 1:
            runs = layer_ranges(self._model.num_layers, layout.pp)
            env["VLLM_PP_LAYER_PARTITION"] = ",".join(str(len(run)) for run in runs)
        args = self._arguments(layout, devices, port, env)
        try:
            lead = self.pool.front(devices[0]) if fronted else seats[0]
        except (SeatDead, WaitTimeout) as error:
            raise EngineError(name, "start", str(error)) from error
        engine = VllmEngine(name, layout, devices, lead, seats, settings, self._closed)
        self._ports[name] = port
        try:
            lead.call("start", settings.start_s, args=args, env=env, secret=self.pool.secret)
            if layout.num_devices > 1:
                engine.rpc("nereus_unlink_shared")
        except (EngineError, EngineLost, SeatDead, SeatError, WaitTimeout) as error:
            engine.broken(str(error))
            engine.close()
            raise EngineError(name, "start", str(error)) from error
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
            "hf_overrides": {"architectures": [ARCHITECTURES[self._model.family]]},
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "disable_log_stats": False,
            "seed": 0,
        }
        if settings.executor == "seats":
            followers = devices if settings.front == "async" else devices[1:]
            args["additional_config"] = {
                "nereus": {
                    "followers": [(f"seat {d}", self.pool.address(d)) for d in followers],
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
        fronted = self._settings.front == "async"
        for process in engine.processes:
            if process.alive and not (clean and self._released(process, fronted)):
                process.kill()
        _sweep(self._ports.pop(engine.name, None))
        if clean and self._settings.executor == "seats":
            self._recycle(engine.devices)

    def _released(self, process: SeatProcess, fronted: bool) -> bool:
        """Wait until a seat has freed its rank; the leading seat had when it answered."""
        if not fronted or process not in self.pool:
            return not fronted  # a front ends with its engine
        try:
            process.call("released", self._settings.call_s)
        except (SeatDead, SeatError, WaitTimeout):
            return False
        return True

    def _recycle(self, devices: tuple[Device, ...]) -> None:
        """Replace seats that have grown by more than `recycle_bytes` since their first engine."""
        if self._recycle_bytes is None:
            return
        for device in devices:
            try:
                resident, _ = self.pool.seat(device).call("memory", self._settings.call_s)
            except (SeatDead, SeatError, WaitTimeout):
                continue  # the next engine there is given another seat
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


def free_port() -> int:
    """Return a port of this host that nobody listens on."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _sweep(port: int | None) -> None:
    """Remove shared memory of CPU groups of an engine that failed early: they carry its port."""
    if port is None:
        return
    for path in SHARED_MEMORY.iterdir():
        if path.name.startswith(f"{port}-") and "cpushm" in path.name:
            path.unlink(missing_ok=True)
