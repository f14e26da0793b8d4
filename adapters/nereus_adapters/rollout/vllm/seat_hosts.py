"""SeatHost: what starts seats on one host. OneHost has them all on this one, whatever its nodes."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Protocol

from nereus_adapters.rollout.hosts import Hosts, ThisHost
from nereus_adapters.rollout.own_folder import OwnFolder
from nereus_adapters.rollout.port import free_port
from nereus_adapters.rollout.vllm.forking import Stem
from nereus_adapters.rollout.vllm.shared import SHARED_MEMORY
from nereus_adapters.rollout.vllm.values import DRIVER, Boot, Fork
from nereus_core.cluster import Device
from nereus_core.errors import SeatDead, WaitTimeout

_FOLDER_CHARS = 107 - 37
"""Longest folder in which vLLM's sockets fit: unix(7) allows 107, vLLM names them by 36."""


class SeatLine(Protocol):
    """Messages to and from a seat."""

    def send_bytes(self, message: bytes, /) -> None:
        """Send one, pickled; may block; raises OSError when the seat is gone."""
        ...

    def recv(self) -> Any:
        """Wait for one; raises EOFError or OSError when the seat is gone."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Process(Protocol):
    """The process of a seat."""

    pid: int
    """On its host."""

    def kill(self) -> None:
        """End it at once."""
        ...

    def ended(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it came."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A seat that is up and has greeted."""

    process: Process
    line: SeatLine
    address: str
    """Where a leader on the same host connects."""


class SeatHost(Protocol):
    """Starts seats on one host."""

    def open(self, device: Device, *, front: bool) -> Opened:
        """Start a seat, or the front of an engine.

        Raises:
            SeatDead: it ended while it started; its output is in the error's note.
            WaitTimeout: it did not come up in time.
        """
        ...

    def folder_of(self, model: Path) -> str:
        """Return where a model's folder is on the host."""
        ...

    def free_port(self) -> int:
        """Return a port of the host that nobody listens on."""
        ...

    def sweep(self, port: int) -> None:
        """Remove shared memory of an engine that failed early: its CPU groups carry its port."""
        ...


class SeatHosts(Protocol):
    """The hosts that devices are on."""

    secret: bytes
    """Of all seats."""
    apart: bool
    """Whether every node is a host of its own."""
    weights: Hosts
    """Where engines read weights."""

    def of(self, node: str) -> SeatHost:
        """Return a node's host; raises HostLost when there is none now."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


class LocalHost:
    """Seats on this host, forked from one stem. Implements `SeatHost`.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        env: variables of every seat, besides those of this process.
        secret: of the pool.
        start_s: longest wait for the stem's imports and for a seat to come up.
    """

    def __init__(
        self, accelerator: str, env: Mapping[str, str], secret: bytes, start_s: float
    ) -> None:
        self._start_s, self._secret = start_s, secret
        self._own = OwnFolder("nereus-vllm-")
        self.folder = self._own.path
        """Removed by the stem, should this process not do it; by the next, should neither."""
        boot = Boot(secret.hex(), os.getpid(), accelerator, str(self.folder))
        if len(str(self.folder)) <= _FOLDER_CHARS:
            env = {**env, "VLLM_RPC_BASE_PATH": str(self.folder)}
        self._stem = Stem(boot, env, self.folder / "stem.log", start_s)
        self._count = itertools.count()

    def open(self, device: Device, *, front: bool) -> Opened:
        """Fork a seat and connect to it."""
        name = str(next(self._count))
        address, log = self.folder / f"{name}.sock", self.folder / f"{name}.log"
        process = self._stem.fork(Fork(str(address), str(log), front))
        deadline_s = time.monotonic() + self._start_s  # the stem's imports have had their own
        while (connection := self._connected(address)) is None:
            if process.ended(0.005):
                error = SeatDead(device, None, "its start")
                error.add_note(log.read_text(encoding="utf-8", errors="replace")[-4000:])
                raise error
            if time.monotonic() > deadline_s:
                process.kill()
                raise WaitTimeout(f"seat {device} to come up", self._start_s)
        connection.send(DRIVER)
        if not connection.poll(self._start_s):
            process.kill()
            raise WaitTimeout(f"seat {device} to greet its driver", self._start_s)
        connection.recv()
        return Opened(process, connection, str(address))

    def _connected(self, address: Path) -> Connection | None:
        """Connect to a seat; None while it does not listen yet."""
        try:
            return Client(str(address), "AF_UNIX", authkey=self._secret)
        except (FileNotFoundError, ConnectionRefusedError):
            return None

    def folder_of(self, model: Path) -> str:
        """Return the folder itself."""
        return str(model)

    def free_port(self) -> int:
        """Return a free port."""
        return free_port()

    def sweep(self, port: int) -> None:
        """Remove shared memory by its port."""
        for path in SHARED_MEMORY.iterdir():
            if path.name.startswith(f"{port}-") and "cpushm" in path.name:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """End the stem and remove the folder, after the seats. Safe to call twice."""
        self._stem.close()
        self._own.close()


class OneHost:
    """This host has all nodes. Implements `SeatHosts`.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        env: variables of every seat, besides those of this process.
        start_s: longest wait for imports and for a seat to come up.
    """

    apart = False

    def __init__(self, accelerator: str, env: Mapping[str, str], *, start_s: float = 600.0) -> None:
        self.secret = secrets.token_bytes(32)
        self.weights: Hosts = ThisHost()
        self._host = LocalHost(accelerator, env, self.secret, start_s)

    def of(self, node: str) -> LocalHost:
        """Return this host."""
        return self._host

    def close(self) -> None:
        """End the stem and remove the folder."""
        self._host.close()
