"""HostActor: a Ray actor on each host of a job, with the host's seats and its memory for weights.

What passes between the driver and a seat passes through it, as bytes that it does not read. It ends
with its driver, as Ray has it, and the seats end with it. Imports nothing heavy until it is made.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereus_adapters.rollout.vllm.writing import Writer

if TYPE_CHECKING:
    from nereus_adapters.rollout.vllm.seat_hosts import Opened

_MANY = 256
"""Messages of a seat that are handed on at once, at most; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What an actor is told."""

    node: str
    """Name of the host."""
    accelerator: str
    env: Mapping[str, str]
    secret: bytes
    start_s: float


class HostActor:
    """One host. Calls come pickled, and so do answers: (whether it worked, what came of it)."""

    def __init__(self, settings: bytes) -> None:
        from ray.util import get_node_ip_address

        from nereus_adapters.rollout.memory import HostMemory
        from nereus_adapters.rollout.vllm.seat_hosts import LocalHost

        told: HostSettings = pickle.loads(settings)
        self._local = LocalHost(told.accelerator, told.env, told.secret, told.start_s)
        self._memory = HostMemory(told.node, get_node_ip_address())
        self._seats: dict[int, Opened] = {}
        self._writers: dict[int, Writer] = {}
        self._count = itertools.count()
        self._putting = threading.Lock()
        self._ended = threading.Event()

    def hello(self) -> None:
        """Return once the actor is there."""

    def watch(self) -> None:
        """Return when the actor has been told to go; fails when it dies before."""
        self._ended.wait()

    def memory(self, call: bytes) -> bytes:
        """Run a method of the host's memory."""
        return self._answer(self._memory, call)

    def host(self, call: bytes) -> bytes:
        """Run a method of this actor, named without its ``do_``."""
        return self._answer(self, call)

    def _answer(self, target: object, call: bytes) -> bytes:
        method, args = pickle.loads(call)
        try:
            return pickle.dumps((True, getattr(target, method)(*args)))
        except Exception as error:
            return pickle.dumps((False, Failed.of(error)))

    # --- Seats ------------------------------------------------------------------------------------

    def do_open(self, device: Any, front: bool) -> tuple[int, int, str]:
        """Start a seat; return its key here, its process id and its address."""
        opened = self._local.open(device, front=front)
        key = next(self._count)
        assert isinstance(opened.line, Connection)
        self._writers[key] = Writer(opened.line, f"to seat {device}")
        self._seats[key] = opened
        return key, opened.process.pid, opened.address

    def do_pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def do_put(self, files: Mapping[str, bytes]) -> str:
        """Write a model's files into a folder of this host; return it."""
        digest = hashlib.sha256(pickle.dumps(sorted(files.items()))).hexdigest()[:16]
        folder = self._local.folder / f"model-{digest}"
        with self._putting:
            if not folder.exists():  # whole where it is: an engine may read it now
                fresh = Path(tempfile.mkdtemp(dir=self._local.folder))
                for name, content in files.items():
                    (fresh / name).write_bytes(content)
                fresh.rename(folder)
        return str(folder)

    def do_free_port(self) -> int:
        """Return a free port of this host."""
        return self._local.free_port()

    def do_sweep(self, port: int) -> None:
        """Remove an engine's shared memory."""
        self._local.sweep(port)

    def do_ended(self, key: int, timeout_s: float) -> bool:
        """Wait for the end of a seat's process."""
        opened = self._seats.get(key)
        return opened is None or opened.process.ended(timeout_s)

    def do_kill(self, key: int) -> None:
        """End a seat's process."""
        if (opened := self._seats.get(key)) is not None:
            opened.process.kill()

    def do_forget(self, key: int) -> None:
        """Let go of a seat that has ended."""
        opened, writer = self._seats.pop(key, None), self._writers.pop(key, None)
        if writer is not None:
            writer.close()
        if opened is not None:
            opened.process.close()

    def do_close(self) -> None:
        """End the stem; the seats have been told to go."""
        self._local.close()
        self._ended.set()

    def send(self, key: int, message: bytes) -> None:
        """Hand a message to a seat; others do not wait for one that reads none."""
        if (writer := self._writers.get(key)) is not None:
            writer.write(message)

    def receive(self, key: int) -> list[bytes] | None:
        """Wait for messages of a seat; None when it is gone."""
        line = self._line(key)
        if line is None:
            return None
        found: list[bytes] = []
        try:
            found.append(line.recv_bytes())
            while len(found) < _MANY and line.poll(0):
                found.append(line.recv_bytes())
        except (EOFError, OSError):
            return found or None  # after what came before the end, the next call sees the end again
        return found

    def _line(self, key: int) -> Connection | None:
        opened = self._seats.get(key)
        if opened is None:
            return None
        assert isinstance(opened.line, Connection)
        return opened.line


@dataclass(frozen=True, slots=True)
class Failed:
    """An error as it crosses: not every class of errors can be pickled."""

    kind: str
    """Name of its class."""
    text: str
    timed: tuple[str, float] | None
    """Of a WaitTimeout."""
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Take an error apart."""
        from nereus_core.errors import WaitTimeout

        timed = (error.awaited, error.timeout_s) if isinstance(error, WaitTimeout) else None
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), timed, trace)
