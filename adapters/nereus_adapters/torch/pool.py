"""LocalPool: seats on this machine, and the store on which they find one another."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from nereus_adapters.torch.channel import Channel, Pending
from nereus_adapters.torch.values import SeatSettings
from nereus_adapters.torch.wire import send_value
from nereus_core.cluster import Device
from nereus_core.errors import ConfigError, DevicesMissing, SeatDead

_LOOPBACK = "127.0.0.1"
_CLOSE_S = 5.0
"""Longest wait for a seat to end by itself. Chosen, not measured."""


class LocalPool:
    """Seat processes, one per device. The store lives here and outlives every seat.

    Thread-safe. `send` puts the calls of several seats in line at once: two collective calls
    reach all their seats in the same order, so they cannot wait for each other.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(
        self, device_kind: str, *, threads: int = 1, port: int = 0, start_s: float = 120.0
    ) -> None:
        self._kind, self._threads, self._start_s = device_kind, threads, start_s
        self._store = listening_store(port, _LOOPBACK)
        self._channels: dict[Device, Channel] = {}
        self._order = threading.Lock()
        atexit.register(self.close)

    @property
    def port(self) -> int:
        """Of the store, on the loopback interface."""
        return int(self._store.port)

    @property
    def alive(self) -> frozenset[Device]:
        """Devices whose seat answers."""
        return frozenset(d for d, c in self._channels.items() if c.alive)

    @property
    def draining(self) -> frozenset[Device]:
        """Devices announced to leave: none, this machine gives no notice."""
        return frozenset()

    @property
    def returned(self) -> frozenset[Device]:
        """Lost devices with a new seat: none, nobody but the job starts one here."""
        return frozenset()

    def require(self, need: int) -> None:
        """Raise DevicesMissing unless this machine has as many devices of the pool's kind."""
        if self._kind == "cuda" and (found := torch.cuda.device_count()) < need:
            raise DevicesMissing("CUDA", need, found)

    def start(self, devices: Iterable[Device]) -> None:
        """Start seats, all at once, and wait until they are up; a live seat is left alone.

        Raises:
            SeatDead: a seat ended while it started.
            WaitTimeout: a seat did not come up in time.
            DevicesMissing: there are more seats than devices; none was started.
        """
        wanted = [d for d in devices if d not in self.alive]
        self.require(1 + max((d.index for d in wanted), default=-1))
        for device in wanted:
            old = self._channels.pop(device, None)
            if old is not None:
                old.close(_CLOSE_S)
            self._channels[device] = self._spawn(device)
        for pending in self.send({device: ("hello", {}) for device in wanted}):
            pending.wait(self._start_s)

    def send(self, calls: Mapping[Device, tuple[str, Mapping[str, Any]]]) -> list[Pending]:
        """Put one call per device in line, in one go, in device order."""
        with self._order:
            return [
                self._channel(device, method).call(method, **kwargs)
                for device, (method, kwargs) in sorted(calls.items())
            ]

    def call(self, device: Device, method: str, **kwargs: Any) -> Pending:
        """Put one call in line."""
        return self.send({device: (method, kwargs)})[0]

    def kill(self, device: Device) -> None:
        """End a seat without notice, and wait until it is gone."""
        channel = self._channel(device, "kill")
        channel.kill()
        channel.join(_CLOSE_S)

    def stop(self, device: Device) -> None:
        """Let a seat finish its calls and end."""
        self._channel(device, "stop").close(_CLOSE_S)

    def pid(self, device: Device) -> int:
        """Return the process id of a seat."""
        return self._channel(device, "pid").process.pid

    def close(self) -> None:
        """End all seats. Safe to call twice."""
        atexit.unregister(self.close)
        channels = list(self._channels.values())
        for channel in channels:
            channel.say_goodbye()
        for channel in channels:
            channel.close(_CLOSE_S)

    def _channel(self, device: Device, doing: str) -> Channel:
        if device not in self._channels:
            raise SeatDead(device, None, doing)
        return self._channels[device]

    def _spawn(self, device: Device) -> Channel:
        ours, theirs = socket.socketpair()
        # Not multiprocessing's spawn: that would import the user's main module in every seat.
        command = [sys.executable, "-m", "nereus_adapters.torch.seat", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # gloo greets there
                env=_environment(),
            )
        connection = Connection(ours.detach())
        index = f":{device.index}" if self._kind == "cuda" else ""
        settings = SeatSettings(
            f"{self._kind}{index}", self._threads, _LOOPBACK, self.port, self._start_s
        )
        send_value(connection, settings)
        return Channel(device, process, connection)


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        # The same code as the driver's, wherever it was imported from.
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def listening_store(port: int, host: str) -> dist.TCPStore:
    """Host a store on one interface only (by itself it would listen on all)."""
    listener = socket.socket()
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            "backend.port", f"{port} on {host} cannot be used: {error.strerror}"
        ) from error
    listener.listen()
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
