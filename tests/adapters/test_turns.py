"""Turns of exchanges: side by side where they share no party, first come first served else."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from nereus_adapters.rollout.turns import Turns
from nereus_core.errors import WaitTimeout

WAIT_S = 30.0


@pytest.fixture
def hold():
    """Take turns on threads of their own, each until its block ends."""
    done = []

    @contextmanager
    def held(turns, *names, longest_s=WAIT_S):
        taken, over = threading.Event(), threading.Event()

        def take():
            with turns.take(names, longest_s):
                taken.set()
                assert over.wait(WAIT_S)

        done.append(threads.submit(take))
        try:
            yield taken
        finally:
            over.set()

    with ThreadPoolExecutor(8) as threads:
        yield held
        for one in done:
            one.result(WAIT_S)


def come(turns, count):
    """Wait until so many have come."""
    deadline = threading.Event()
    for _ in range(3000):
        if len(turns._come) == count:
            return
        deadline.wait(0.01)
    raise AssertionError(f"{len(turns._come)} turns, expected {count}")


def test_turns_that_share_no_party_are_taken_at_once(hold):
    turns = Turns()
    with hold(turns, "a", "b") as first, hold(turns, "c", "d") as second:
        assert first.wait(WAIT_S)
        assert second.wait(WAIT_S)


def test_a_turn_waits_for_those_before_it_that_share_a_party_and_is_not_overtaken(hold):
    turns = Turns()
    with hold(turns, "a", "b") as first:
        assert first.wait(WAIT_S)
        with hold(turns, "b", "c") as second:
            come(turns, 2)
            with hold(turns, "c", "d") as third, hold(turns, "e") as other:
                come(turns, 4)
                assert other.wait(WAIT_S)
                # c is free, but whoever wants b and c came first
                assert not second.is_set()
                assert not third.is_set()


def test_a_wait_for_a_turn_ends_with_what_was_awaited(hold):
    turns = Turns()
    with hold(turns, "a", "b", longest_s=0.05) as first:
        assert first.wait(WAIT_S)
        with (
            pytest.raises(WaitTimeout, match="exchanges of weights before this one to leave b"),
            turns.take(("b", "c"), WAIT_S),
        ):
            pass
        with turns.take(("c",), WAIT_S):  # who gave up is in nobody's way
            pass
