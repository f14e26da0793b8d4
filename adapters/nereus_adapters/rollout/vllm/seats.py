"""SeatPool: seats as the driver sees them. A seat is a process that stays."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from nereus_adapters.rollout.hosts import HostLost
from nereus_adapters.rollout.vllm.forking import END_S
from nereus_adapters.rollout.vllm.seat_hosts import Process, SeatHosts, SeatLine
from nereus_adapters.rollout.vllm.values import BROKEN, Call, Drawn, Reply
from nereus_adapters.rollout.vllm.writing import Writer
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, SeatDead, WaitTimeout


class SeatError(NereusError):
    """A call failed on a seat; its traceback is a note."""

    def __init__(self, device: Device, method: str, reply: Reply) -> None:
        self.kind = (reply.error or "").partition(":")[0]
        super().__init__(f"{method} on seat {device}: {reply.error}")
        self.add_note(reply.trace)


class SeatProcess:
    """One seat: calls out, replies and tokens in, word of its death.

    Args:
        device: the seat's name.
        process: its process.
        line: to it, greeted.
    """

    def __init__(self, device: Device, process: Process, line: SeatLine) -> None:
        self.device, self.process = device, process
        self._line, self._writer = line, Writer(line, f"to seat {device}")
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, Future[Any]]] = {}
        self._next = 0
        self._ended = False
        self.on_drawn: Callable[[list[Drawn]], None] = lambda drawn: None
        self.on_broken: Callable[[str], None] = lambda why: None
        """Told when the engine's step failed, or the process ended."""
        self._reader = threading.Thread(target=self._read, name=f"seat {device}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the process still answers."""
        return not self._ended

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def send(self, call: str, /, **kwargs: object) -> Future[Any]:
        """Send a call, without waiting; the future gets SeatDead when the seat ends first."""
        future: Future[Any] = Future()
        with self._lock:
            number = self._next
            self._next += 1
        message = _pickled(Call(number, call, kwargs))
        with self._lock:
            if self._ended:
                future.set_exception(SeatDead(self.device, None, call))
            else:
                self._open[number] = (call, future)
                self._writer.write(message)
        return future

    def call(self, call: str, timeout_s: float, /, **kwargs: object) -> Any:
        """Send a call and wait.

        Raises:
            SeatDead: the seat ended first.
            SeatError: what the call raised there.
            WaitTimeout: it did not answer in time.
        """
        future = self.send(call, **kwargs)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise WaitTimeout(f"seat {self.device} to {call}", timeout_s) from None

    def kill(self) -> None:
        """End the process at once; returns when that has been noticed."""
        self.process.kill()
        self._reader.join(END_S)

    def close(self) -> None:
        """Let the process end, after what it is doing; kill it when that takes long."""
        self._writer.write(_pickled(None))
        if not self._ends():
            self.process.kill()
        self._reader.join(END_S)

    def _ends(self) -> bool:
        """Wait for the end of the process; its host may not know, or not answer."""
        try:
            return self.process.ended(END_S)
        except NereusError:
            return False

    def _read(self) -> None:
        with contextlib.ExitStack() as ending:  # the last first, each whatever becomes of another
            ending.callback(self.process.close)
            ending.callback(self._writer.close)
            ending.callback(self._gone)
            ending.callback(self._ensure_end)
            try:
                self._listen()
            except BaseException:
                self.process.kill()
                raise

    def _listen(self) -> None:
        while True:
            try:
                message = self._line.recv()
            except (EOFError, OSError):
                return
            if isinstance(message, list):
                self.on_drawn(message)
            elif message.id == BROKEN:
                self.on_broken(message.error)
            else:
                with self._lock:
                    method, future = self._open.pop(message.id)
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(SeatError(self.device, method, message))

    def _ensure_end(self) -> None:
        if not self._ends():
            self.process.kill()
            self._ends()

    def _gone(self) -> None:
        with self._lock:
            self._ended = True
            left, self._open = self._open, {}
        for method, future in left.values():
            future.set_exception(SeatDead(self.device, None, method))
        self.on_broken(f"seat {self.device} ended")


def _pickled(message: Call | None) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


class SeatPool:
    """Seats by device, on the hosts of their nodes. Thread-safe.

    Args:
        hosts: what starts them; closed with the pool.
    """

    def __init__(self, hosts: SeatHosts) -> None:
        self.hosts, self.secret = hosts, hosts.secret
        self._lock = threading.Lock()
        self._seats: dict[Device, SeatProcess] = {}
        self._addresses: dict[Device, str] = {}

    def start(self, devices: Iterable[Device]) -> None:
        """Start seats and wait until they are up; a live one is left alone.

        Raises:
            SeatDead: one ended while it started; its output is in the error's note.
            WaitTimeout: one did not come up in time.
        """
        for device in devices:
            if device not in self.alive:
                seat = self._started(device)
                with self._lock:
                    self._seats[device] = seat

    def seat(self, device: Device) -> SeatProcess:
        """Return a seat; raises SeatDead for one that is not there."""
        with self._lock:
            seat = self._seats.get(device)
        if seat is None or not seat.alive:
            raise SeatDead(device, None, "what it was to do")
        return seat

    def __contains__(self, process: SeatProcess) -> bool:
        """Whether a process is one of the seats."""
        with self._lock:
            return process in self._seats.values()

    def address(self, device: Device) -> str:
        """Return where a seat's leader connects."""
        return self._addresses[device]

    @property
    def alive(self) -> frozenset[Device]:
        """Devices whose seats answer."""
        with self._lock:
            return frozenset(d for d, seat in self._seats.items() if seat.alive)

    def renew(self, device: Device) -> None:
        """End a seat and start another in its place."""
        with self._lock:
            seat = self._seats.pop(device, None)
        if seat is not None and seat.alive:
            seat.close()
        self.start([device])

    def front(self, device: Device) -> SeatProcess:
        """Start the front of an engine, named after its first device; whoever asks ends it."""
        return self._started(device, front=True)

    def kill(self, device: Device) -> None:
        """End a seat's process at once."""
        with self._lock:
            seat = self._seats.get(device)
        if seat is not None and seat.alive:
            seat.kill()

    def close(self) -> None:
        """End all seats, then their hosts. Safe to call twice."""
        try:
            self.end()
        finally:
            self.hosts.close()

    def end(self) -> None:
        """End all seats; hosts stay."""
        with self._lock:
            seats, self._seats = list(self._seats.values()), {}
        threads = [threading.Thread(target=seat.close) for seat in seats if seat.alive]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * END_S)

    def _started(self, device: Device, *, front: bool = False) -> SeatProcess:
        try:
            opened = self.hosts.of(device.node).open(device, front=front)
        except HostLost as error:
            raise SeatDead(device, None, f"its start: {error}") from error
        if not front:
            self._addresses[device] = opened.address
        return SeatProcess(device, opened.process, opened.line)
