"""A loop that is taken turn by turn: nothing late is taken for the result of another turn."""

import threading

import pytest

from nereus_adapters.verl.paced import LoopOver, Paced
from nereus_core.errors import WaitTimeout

pytestmark = pytest.mark.real
LONG_S, SHORT_S = 30.0, 0.05


def paced(loop, turn_s=LONG_S, stand_s=LONG_S):
    return Paced(loop, "a loop", turn_s=turn_s, stand_s=stand_s)


def test_it_goes_from_boundary_to_boundary_and_no_further():
    done = []

    def loop(run):
        for step in range(10):
            done.append(step)
            run.stand()

    run = paced(loop)
    for step in range(3):
        run.turn()
        assert done == list(range(step + 1))
    run.end()
    assert done == [0, 1, 2]
    with pytest.raises(LoopOver, match="it was ended"):
        run.turn()


def test_a_loop_that_returns_says_so_at_once():
    run = paced(lambda run: run.stand())
    run.turn()
    with pytest.raises(LoopOver, match="it has returned"):
        run.turn()
    with pytest.raises(LoopOver, match="it has returned"):
        run.turn()
    run.end()


def test_a_loop_that_died_takes_no_more_turns():
    def loop(run):
        run.stand()
        raise ValueError("a rank is gone")

    run = paced(loop)
    run.turn()
    with pytest.raises(ValueError, match="a rank is gone"):
        run.turn()
    with pytest.raises(LoopOver, match="ValueError: a rank is gone"):
        run.turn()
    run.end()


def test_what_comes_too_late_is_no_turns_result():
    late = threading.Event()

    def loop(run):
        late.wait(LONG_S)
        run.stand()

    run = paced(loop, turn_s=SHORT_S)
    with pytest.raises(WaitTimeout, match="the next boundary of a loop"):
        run.turn()
    with pytest.raises(WaitTimeout, match="a loop to end"):
        run.end()
    late.set()
    with pytest.raises(LoopOver, match="did not end within"):
        run.turn()
    other = paced(lambda run: run.stand())
    other.turn()
    other.end()


def test_a_loop_that_nobody_asks_does_not_stand_for_ever():
    def loop(run):
        try:
            run.stand()
        finally:
            ended.set()

    ended = threading.Event()
    run = paced(loop, stand_s=SHORT_S)
    run.turn()
    assert ended.wait(LONG_S)
    with pytest.raises(WaitTimeout, match="a turn of a loop"):
        run.turn()
    run.end()
