import signal
import threading
import time

import pytest

from nereus_core.errors import WaitTimeout
from nereus_plugins.deadline import deadline


@pytest.fixture(autouse=True)
def no_other_alarm():
    """A test's own timeout may be an alarm: it rests while deadlines are tested."""
    heard, (left_s, _) = (
        signal.getsignal(signal.SIGALRM),
        signal.setitimer(signal.ITIMER_REAL, 0),
    )
    yield
    signal.signal(signal.SIGALRM, heard)
    signal.setitimer(signal.ITIMER_REAL, left_s)


def test_a_wait_without_end_is_cut_short_and_named():
    with (
        pytest.raises(WaitTimeout, match=r"waited 0\.05 s for verl's weights"),
        deadline("verl's weights", 0.05),
    ):
        threading.Event().wait(30)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_block_that_ends_in_time_leaves_no_alarm_behind():
    before = signal.getsignal(signal.SIGALRM)
    with deadline("nothing", 30):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_outer_deadline_goes_on_after_an_inner_one():
    def both():
        with deadline("the outer", 0.2):
            with deadline("the inner", 30):
                time.sleep(0)
            threading.Event().wait(30)

    with pytest.raises(WaitTimeout, match="the outer"):
        both()


def test_outside_the_main_thread_there_is_no_limit():
    ended = []

    def run():
        with deadline("a thread", 0.01):
            ended.append(threading.Event().wait(0.1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert ended == [False]
