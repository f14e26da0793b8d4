"""An engine whose seats take no messages or fail at them: other processes, behind real lines."""

import multiprocessing
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from rollout_fakes import DEVICE, ONE, SPEC

from nereus_adapters.rollout.hosts import ThisHost
from nereus_adapters.rollout.ports import EngineError, Finish, Prompt, Sampling
from nereus_adapters.rollout.vllm.engine import VllmEngine
from nereus_adapters.rollout.vllm.factory import VllmFactory
from nereus_adapters.rollout.vllm.seat_hosts import Opened
from nereus_adapters.rollout.vllm.seats import SeatProcess
from nereus_adapters.rollout.vllm.settings import VllmSettings
from nereus_adapters.rollout.vllm.values import Drawn, Reply
from nereus_adapters.rollout.vllm.writing import Writer
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, SeatDead
from nereus_core.layout import Layout

pytestmark = pytest.mark.real

OTHER, TP2 = Device("here", 1), Layout(2, 1)
WAIT_S = 60.0
LONG = Prompt("long", tuple(range(10**6)), Sampling(max_tokens=8))
"""More than a socket takes that nobody reads."""
SHORT = Prompt("short", (1, 2, 3), Sampling(max_tokens=8))


class Sleeping:
    """The process of a seat that reads nothing."""

    def __init__(self):
        self.line, there = multiprocessing.Pipe()
        self._process = subprocess.Popen(["sleep", "600"], pass_fds=[there.fileno()])
        there.close()
        self.pid = self._process.pid

    def kill(self):
        self._process.kill()

    def ended(self, timeout_s):
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self):
        """Nothing to do."""


class Scripted:
    """A seat in this process that fails at some calls, and sends what it is told to."""

    pid = 0

    def __init__(self):
        self.failing = set()
        self.line, self.there = multiprocessing.Pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        with self.there:
            while (call := self.there.recv()) is not None:
                if call.method == "wait":
                    continue
                error = "RuntimeError: told to" if call.method in self.failing else None
                self.there.send(Reply(call.id, {}, error))

    def kill(self):
        with suppress(OSError):  # it has ended
            self.line.send(None)

    def ended(self, timeout_s):
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self):
        """Nothing to do."""


def engine_on(layout, *processes):
    devices = (DEVICE, OTHER)[: len(processes)]
    seats = tuple(SeatProcess(d, p, p.line) for d, p in zip(devices, processes, strict=True))
    settings = VllmSettings(Path("no model"), start_s=WAIT_S, call_s=WAIT_S)
    made = VllmEngine("e", layout, devices, seats[0], seats, settings, lambda engine, clean: None)
    return made, seats


def test_a_follower_that_dies_ends_an_engine_whose_leader_takes_no_messages():
    lead, follower = Sleeping(), Sleeping()
    engine, _ = engine_on(TP2, lead, follower)
    with ThreadPoolExecutor(1) as other:
        begun = other.submit(engine.submit, LONG)
        deadline_s = time.monotonic() + WAIT_S
        while not engine._in_flight:
            assert time.monotonic() < deadline_s
        follower.kill()
        assert begun.result(WAIT_S).result(WAIT_S).finish is Finish.INTERRUPTED
    assert lead.ended(WAIT_S)
    assert not engine.alive


def test_who_sends_does_not_wait_for_a_seat_that_takes_no_messages():
    lead = Sleeping()
    engine, (seat,) = engine_on(ONE, lead)
    future = engine.submit(LONG)
    assert engine.submit(SHORT) is not None
    assert not future.done()
    seat.kill()
    assert future.result(WAIT_S).finish is Finish.INTERRUPTED


class Slow:
    """A line whose message goes when it may."""

    def __init__(self):
        self.begun, self.may, self.closed = (threading.Event() for _ in range(3))
        self.sent = []

    def send_bytes(self, message):
        self.begun.set()
        assert self.may.wait(WAIT_S)
        assert not self.closed.is_set()
        self.sent.append(message)

    def close(self):
        self.closed.set()


def test_a_line_is_not_closed_under_a_message():
    line = Slow()
    writer = Writer(line, "to a slow seat")
    writer.write(b"first")
    writer.write(b"second")
    assert line.begun.wait(WAIT_S)
    writer.close()
    writer.close()
    assert not line.closed.is_set()
    line.may.set()
    assert line.closed.wait(WAIT_S)
    assert line.sent == [b"first"]


def test_nothing_is_served_after_a_part_of_the_weights_was_loaded():
    seat = Scripted()
    engine, (process,) = engine_on(ONE, seat)
    try:
        engine.update_weights(1, None)
        seat.failing = {"update"}
        with pytest.raises(EngineError, match="load weights version 2"):
            engine.update_weights(2, None)
        assert engine.version is None
        assert engine.submit(SHORT).result(0).finish is Finish.INTERRUPTED
        seat.failing = set()
        engine.update_weights(2, None)
        response = engine.submit(SHORT)
        seat.there.send([Drawn(f"{SHORT.id}/1", (7,), (0.0,), 2, "stop")])
        assert response.result(WAIT_S).tokens == (7,)
    finally:
        process.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_end_with_a_reader_that_fails():
    seat = Scripted()
    process = SeatProcess(DEVICE, seat, seat.line)

    def fail(drawn):
        raise RuntimeError("told to")

    process.on_drawn = fail
    waiting = process.send("wait")
    seat.there.send([Drawn("any", (7,), (0.0,), 1, None)])
    with pytest.raises(SeatDead):
        waiting.result(WAIT_S)
    process.kill()  # returns after the reader, whose error is told in this test
    assert not process.alive


class Failing:
    """Hosts, and the one there is: seats come up, nothing else works."""

    secret, apart, weights = b"", False, ThisHost()

    def __init__(self):
        self.seats, self.ended = [], []

    def of(self, node):
        return self

    def open(self, device, *, front):
        self.seats.append(Scripted())
        return Opened(self.seats[-1], self.seats[-1].line, "")

    def free_port(self):
        raise NereusError("free_port on host here: told to")

    def sweep(self, port):
        self.ended.append(f"sweep {port}")
        raise RuntimeError("told to")

    def close(self):
        assert all(seat.ended(0) for seat in self.seats)
        self.ended.append("hosts")


def test_a_factory_whose_host_fails_says_so_and_still_ends_everything():
    hosts = Failing()
    factory = VllmFactory(VllmSettings(Path("no model")), SPEC, (DEVICE,), hosts=hosts)
    with pytest.raises(EngineError, match="failed to start: free_port on host here: told to"):
        factory.create("e", ONE, (DEVICE,))
    factory._ports = {"one": (hosts, 1), "other": (hosts, 2)}
    with pytest.raises(RuntimeError, match="told to"):
        factory.close()
    assert hosts.ended == ["sweep 2", "sweep 1", "hosts"]
