"""Seats: they start, answer in order, fail by name, and end with their driver."""

import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nereus_adapters.torch.channel import Channel
from nereus_adapters.torch.folder import PoolFolder
from nereus_adapters.torch.pool import LocalPool
from nereus_adapters.torch.wire import Failure, SeatError
from nereus_core.cluster import Device
from nereus_core.errors import LayoutError, NereusError, SeatDead, WaitTimeout
from nereus_core.layout import Layout

pytestmark = pytest.mark.real

FIRST, SECOND = Device("node0", 0), Device("node0", 1)


@pytest.fixture
def seats(pool):
    pool.start([FIRST, SECOND])
    return pool


def test_everything_seats_are_reached_by_is_private(seats):
    folder = seats.folder.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert {p.name for p in folder.glob("*.sock")} >= {"node0:0.sock", "node0:1.sock"}
    assert seats.folder.secret != LocalPool("cpu").folder.secret


def test_a_folder_that_others_may_read_is_refused(tmp_path):
    folder = PoolFolder.made()
    folder.path.chmod(0o755)
    with pytest.raises(NereusError, match="mode 755; expected our own with mode 700"):
        LocalPool.attach(folder.path, "cpu")
    folder.remove()
    with pytest.raises(NereusError, match="holds no seats"):
        LocalPool.attach(folder.path, "cpu")


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
from nereus_adapters.torch.folder import PoolFolder
from nereus_adapters.torch.pool import LocalPool
from nereus_core.cluster import Device
pool = LocalPool("cpu", grace_s=0.5)
pool.start([Device("node0", 0)])
print(pool.pid(Device("node0", 0)), pool.folder.path, flush=True)
sys.stdin.read()
"""


def killed_driver(grace_s):
    """Start a driver with one seat, kill it, and return the seat's pid and its pool's folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER.replace("0.5", str(grace_s))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as driver:
        assert driver.stdout is not None
        pid, folder = driver.stdout.readline().decode().split()
        driver.send_signal(signal.SIGKILL)
    return int(pid), Path(folder)


def ended(pid):
    """Whether a process ends soon."""
    try:
        seat = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([seat], [], [], 30)[0])
    finally:
        os.close(seat)


def test_seats_end_by_themselves_when_no_driver_comes():
    """Also when theirs is killed and can say nothing; and nothing is left of them."""
    pid, folder = killed_driver(0.5)
    assert ended(pid)
    assert not folder.exists()


def test_a_driver_takes_over_the_seats_of_one_that_was_killed():
    pid, folder = killed_driver(60)
    pool = LocalPool.attach(folder, "cpu")
    assert pool.alive == {FIRST}
    assert pool.pid(FIRST) == pid
    assert pool.call(FIRST, "hello").wait(60).value == pid
    pool.start([FIRST, SECOND])
    assert pool.pid(FIRST) == pid
    pool.kill(FIRST)
    assert pool.alive == {SECOND}
    pool.close()
    assert ended(pid)
    assert not folder.exists()


def test_a_channel_that_is_closed_leaves_no_process(seats):
    seats.start([SECOND])
    channel = seats._channels[SECOND]
    assert isinstance(channel, Channel)
    seats.stop(SECOND)
    assert channel.process.returncode == 0
    assert not channel.alive
    seats.start([SECOND])
