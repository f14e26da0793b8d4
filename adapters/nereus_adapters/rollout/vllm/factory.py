"""VllmFactory: engines on seats, started, ended and cleared away."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from nereus_adapters.rollout.architectures import ARCHITECTURES
from nereus_adapters.rollout.hosts import Hosts
from nereus_adapters.rollout.ports import EngineError
from nereus_adapters.rollout.vllm.engine import VllmEngine
from nereus_adapters.rollout.vllm.seat_hosts import OneHost, SeatHost, SeatHosts
from nereus_adapters.rollout.vllm.seats import SeatError, SeatPool, SeatProcess
from nereus_adapters.rollout.vllm.settings import VllmSettings, environment
from nereus_core.cluster import Device
from nereus_core.errors import ConfigError, NereusError, SeatDead, WaitTimeout
from nereus_core.layout import Layout, layer_ranges
from nereus_core.model import ModelSpec


class VllmFactory:
    """Engines of one model on seats.

    Implements `nereus_adapters.rollout.ports.EngineFactory`.

    Args:
        settings: how engines are started.
        model: shapes.
        devices: that there are; a seat is forked for each when it is first needed.
        accelerator: what devices are.
        recycle_bytes: a seat that has grown by more is replaced between two engines; None: never.
        pool: seats of somebody else, who closes them.
        hosts: that the factory's own seats are on; by default this one, whatever devices' nodes.

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
        hosts: SeatHosts | None = None,
    ) -> None:
        if settings.front == "async" and settings.executor != "seats":
            what = f"is for seats; vLLM's own {settings.executor!r} executor is stepped by its seat"
            raise ConfigError("backend.vllm.front", f"'async' {what}")
        if settings.executor == "ray" and accelerator == "cpu":
            # vLLM 0.32 platforms/cpu.py has no ray_device_key: v1/executor/ray_utils.py raises.
            what = "vLLM knows no Ray resource of a CPU; take 'seats' (on several hosts with pool ="
            raise ConfigError("backend.vllm.executor", f"'ray': {what} 'ray') or 'mp'")
        self._settings, self._model, self._devices = settings, model, devices
        self._recycle_bytes = recycle_bytes
        self._owns_pool = pool is None
        self.pool = pool or SeatPool(hosts or OneHost(accelerator, environment(accelerator)))
        self._ports: dict[str, tuple[SeatHost, int]] = {}
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

    @property
    def hosts(self) -> Hosts:
        """Where engines read weights."""
        return self.pool.hosts.weights

    def problem(self, layout: Layout, devices: tuple[Device, ...]) -> str | None:
        """Say why no engine can be: its ranks share the memory of one host, and its queues."""
        nodes = sorted({device.node for device in devices})
        if self.pool.hosts.apart and len(nodes) > 1:
            return (
                f"a vLLM engine with {layout} would lie on {' and '.join(nodes)}; its seats lease "
                "each other on one host alone: choose devices of one node"
            )
        return None

    def create(self, name: str, layout: Layout, devices: tuple[Device, ...]) -> VllmEngine:
        """Start an engine: its first device leads, the others follow."""
        settings = self._settings
        if problem := self.problem(layout, devices):
            raise EngineError(name, "start", problem)
        leased = settings.executor == "seats"
        fronted = settings.front == "async"
        mine = devices if leased else devices[:1]
        if not leased and devices[0] in self.pool.alive:
            self.pool.renew(devices[0])  # a stock engine starts in a process of its own
        if len(set(devices)) != len(devices):
            raise EngineError(name, "start", f"a device is listed twice: {list(map(str, devices))}")
        try:
            self.pool.start(mine)
            seats = tuple(self.pool.seat(device) for device in mine)
            host = self.pool.hosts.of(devices[0].node)
            port, folder = host.free_port(), host.folder_of(settings.model)
        except NereusError as error:
            raise EngineError(name, "start", str(error)) from error
        env: dict[str, str | None] = {"VLLM_PP_LAYER_PARTITION": None}
        if layout.pp > 1:
            runs = layer_ranges(self._model.num_layers, layout.pp)
            env["VLLM_PP_LAYER_PARTITION"] = ",".join(str(len(run)) for run in runs)
        args = self._arguments(layout, devices, folder, port, env)
        try:
            lead = self.pool.front(devices[0]) if fronted else seats[0]
        except NereusError as error:
            raise EngineError(name, "start", str(error)) from error
        engine = VllmEngine(name, layout, devices, lead, seats, settings, self._closed)
        self._ports[name] = (host, port)
        try:
            lead.call("start", settings.start_s, args=args, env=env, secret=self.pool.secret)
            if layout.num_devices > 1:
                engine.rpc("nereus_unlink_shared")
        except NereusError as error:
            engine.broken(str(error))
            engine.close()
            raise EngineError(name, "start", str(error)) from error
        return engine

    def _arguments(
        self,
        layout: Layout,
        devices: tuple[Device, ...],
        folder: str,
        port: int,
        env: Mapping[str, str | None],
    ) -> dict[str, Any]:
        settings = self._settings
        args: dict[str, Any] = {
            "model": folder,
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
        if (found := self._ports.pop(engine.name, None)) is not None:
            host, port = found
            host.sweep(port)
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
        """End all seats, unless the pool is somebody else's; then what they leave; hosts last."""
        with contextlib.ExitStack() as ending:  # the last first, each whatever becomes of another
            if self._owns_pool:
                ending.callback(self.pool.close)
            for host, port in self._ports.values():
                ending.callback(host.sweep, port)
            if self._owns_pool:
                ending.callback(self.pool.end)
