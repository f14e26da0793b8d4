"""Channel: the driver's end of one seat: calls out, replies in, and word of its death."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

from nereus_adapters.torch.link import Link, Refused, log
from nereus_adapters.torch.process import Process
from nereus_adapters.torch.wire import Call, Reply, receive, send_value
from nereus_core.cluster import Device
from nereus_core.errors import SeatDead, WaitTimeout

_REAP_S = 10.0
"""A process whose pipe closed is about to end; longer than that and it is killed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A value with the seconds the seat spent on it."""

    value: Any
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Pending:
    """A call under way."""

    device: Device
    method: str
    future: Future[Answer]

    def wait(self, timeout_s: float) -> Answer:
        """Return the answer.

        Raises:
            SeatDead: the seat ended first.
            WaitTimeout: it did not answer in time; names seat and method.
            Exception: what the method raised on the seat, with the seat's traceback as a note.
        """
        try:
            return self.future.result(timeout_s)
        except FutureTimeout:
            if self.future.done():  # the method itself raised a TimeoutError
                raise
            awaited = f"seat {self.device} to finish {self.method}"
            raise WaitTimeout(awaited, timeout_s) from None


class Channel:
    """Calls to one seat process, run there in the order in which they were sent."""

    def __init__(self, device: Device, process: Process, link: Link) -> None:
        self.device, self.process = device, process
        self._link = link
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[str, Future[Answer]]] = {}
        self._next_id = 0
        self._dead = False
        self._reader = threading.Thread(target=self._read, name=f"seat {device}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the seat still answers."""
        return not self._dead

    def call(self, method: str, **kwargs: object) -> Pending:
        """Send a call; a dead seat fails it at once."""
        future: Future[Answer] = Future()
        with self._lock:
            self._pending[self._next_id] = (method, future)
            # A seat that died a moment ago: the reader sees the end and fails every pending call.
            with contextlib.suppress(OSError):
                send_value(self._link, Call(self._next_id, method, kwargs))
            self._next_id += 1
            dead = self._dead
        if dead:
            self._bury()
        return Pending(self.device, method, future)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until the end of the process has been noticed."""
        self._reader.join(timeout_s)

    def say_goodbye(self) -> None:
        """Let the process end after the calls it has."""
        with contextlib.suppress(OSError), self._lock:
            send_value(self._link, None)

    def close(self, timeout_s: float) -> None:
        """Let the process end after the calls it has; kill it when it takes longer."""
        self.say_goodbye()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_REAP_S)
        self._reader.join(_REAP_S)
        self._link.close()

    def _read(self) -> None:
        while True:
            try:
                reply: Reply = receive(self._link)
            except (EOFError, OSError):
                break
            except Refused as error:
                log.warning("seat %s: %s It is ended.", self.device, error)
                self._link.close()
                self.process.kill()
                break
            with self._lock:
                method, future = self._pending.pop(reply.id)
            if reply.failure is None:
                future.set_result(Answer(reply.value, reply.elapsed_s))
            else:
                future.set_exception(reply.failure.rebuilt(self.device, method))
        with self._lock:
            self._dead = True
        self._bury()

    def _bury(self) -> None:
        try:
            code: int | None = self.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(_REAP_S)
        with self._lock:
            left, self._pending = self._pending, {}
        for method, future in left.values():
            future.set_exception(SeatDead(self.device, code, method))
