"""Seats: they start, answer in order, fail by name, and end with their driver."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nereus_adapters.torch.channel import Channel
from nereus_adapters.torch.pool import LocalPool
from nereus_adapters.torch.wire import Failure, SeatError
from nereus_core.cluster import Device
from nereus_core.errors import ConfigError, LayoutError, NereusError, SeatDead, WaitTimeout
from nereus_core.layout import Layout

pytestmark = pytest.mark.real

FIRST, SECOND = Device("node0", 0), Device("node0", 1)


@pytest.fixture
def seats(pool):
    pool.start([FIRST, SECOND])
    return pool


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"backend.port: {port} on 127.0.0.1 .*in use"):
            LocalPool("cpu", port=port)


def test_the_store_listens_on_the_loopback_interface_only(seats):
    sockets = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]
    ]
    listening = [
        local for _, local, _, state, *_ in sockets
        if state == "0A" and local.endswith(f":{seats.port:04X}")
    ]  # fmt: skip
    assert listening == [f"0100007F:{seats.port:04X}"]


def test_answers_come_back_with_their_seconds(seats):
    answers = [p.wait(60) for p in seats.send({d: ("hello", {}) for d in (FIRST, SECOND)})]
    assert [a.value for a in answers] == [seats.pid(FIRST), seats.pid(SECOND)]
    assert all(a.elapsed_s >= 0 for a in answers)


def test_a_call_that_does_not_exist_is_refused(seats):
    with pytest.raises(NereusError, match="no method '_free'"):
        seats.call(FIRST, "_free").wait(60)


def test_an_error_keeps_its_class_and_brings_the_traceback(seats):
    with pytest.raises(SeatError, match="drop on seat node0:0: KeyError") as caught:
        seats.call(FIRST, "drop", unit="nobody").wait(60)
    assert "self.units.pop(unit)" in caught.value.__notes__[0]


def test_errors_of_nereus_survive_the_pipe():
    error = LayoutError(Layout(3, 1), "tiny", ["tp=3 does not divide num_heads=4"])
    rebuilt = Failure.of(error).rebuilt(FIRST, "build")
    assert type(rebuilt) is LayoutError
    assert str(rebuilt) == str(error)
    assert rebuilt.problems == error.problems


def test_a_late_answer_names_seat_and_method_and_a_dead_seat_can_be_replaced(seats):
    seats.call(SECOND, "fail_at", phase="prepare", kind="hang").wait(60)
    pending = seats.call(SECOND, "prepare", part=None)
    with pytest.raises(WaitTimeout, match=r"waited 0.2 s for seat node0:1 to finish prepare"):
        pending.wait(0.2)
    seats.kill(SECOND)
    with pytest.raises(SeatDead, match=r"node0:1 ended \(exit code -9\) during prepare"):
        pending.wait(60)
    assert SECOND not in seats.alive
    with pytest.raises(SeatDead, match="during hello"):
        seats.call(SECOND, "hello").wait(60)
    seats.start([FIRST, SECOND])
    assert seats.call(SECOND, "hello").wait(60).value == seats.pid(SECOND)


def test_a_seat_of_no_device_is_dead(seats):
    with pytest.raises(SeatDead, match="node9:9"):
        seats.call(Device("node9", 9), "hello")


DRIVER = """
import sys, time
from nereus_adapters.torch.pool import LocalPool
from nereus_core.cluster import Device
pool = LocalPool("cpu")
pool.start([Device("node0", 0)])
print(pool.pid(Device("node0", 0)), flush=True)
sys.stdin.read()
"""


def test_seats_end_with_their_driver():
    """Also when the driver is killed and can say nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    with driver:
        assert driver.stdout is not None
        seat = os.pidfd_open(int(driver.stdout.readline()))
        try:
            driver.send_signal(signal.SIGKILL)
            ended = threading.Event()

            def watch():
                import select

                if select.select([seat], [], [], 30)[0]:
                    ended.set()

            watcher = threading.Thread(target=watch)
            watcher.start()
            watcher.join()
            assert ended.is_set()
        finally:
            os.close(seat)


def test_a_channel_that_is_closed_leaves_no_process(seats):
    seats.start([SECOND])
    channel = seats._channels[SECOND]
    assert isinstance(channel, Channel)
    seats.stop(SECOND)
    assert channel.process.returncode == 0
    assert not channel.alive
    seats.start([SECOND])
