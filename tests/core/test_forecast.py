import random

import pytest

from nereus_core.cluster import Device
from nereus_core.forecast import Forecaster
from nereus_core.observation import Observation, TokenStats

DEVICES = [Device("node0", i) for i in range(4)]


def seen(tokens, healthy=None, draining=()):
    found = Forecaster()
    for step, mean in enumerate(tokens):
        alive = DEVICES if healthy is None else healthy[step]
        stats = TokenStats(mean, mean, mean, int(mean), 8)
        found = found.seen(
            Observation(step, 1.0, {}, stats, stats, {}, frozenset(alive), frozenset(draining))
        )
    return found


def test_steady_growth_crosses_after_threshold_over_slope():
    crossing = seen([100 + 2 * i for i in range(20)]).steps_to_crossing(0.25, 200)
    assert crossing.steps == pytest.approx(0.25 * 138 / 2)
    assert crossing.signal == "tokens"


def test_shrinking_responses_cross_too():
    crossing = seen([200 - 2 * i for i in range(20)]).steps_to_crossing(0.25, 200)
    assert crossing.steps == pytest.approx(0.25 * 162 / 2)


def test_steady_lengths_never_cross_and_the_cap_applies():
    crossing = seen([100.0] * 20).steps_to_crossing(0.25, 200)
    assert (crossing.steps, crossing.signal) == (200, "none")


def test_noise_hardly_moves_the_expectation():
    noise = random.Random(0)
    crossing = seen([100 + 2 * i + noise.gauss(0, 4) for i in range(32)]).steps_to_crossing(
        0.25, 200
    )
    assert crossing.steps == pytest.approx(0.25 * 162 / 2, rel=0.15)


def test_one_outlier_does_not_turn_the_trend():
    tokens = [100.0 + i for i in range(20)]
    clean = seen(tokens).steps_to_crossing(0.25, 500).steps
    tokens[17] = 900.0
    assert seen(tokens).steps_to_crossing(0.25, 500).steps == pytest.approx(clean, rel=0.05)


def test_before_there_is_a_trend_the_cap_applies():
    for tokens in ([], [100.0], [100.0, 140.0, 180.0]):
        crossing = seen(tokens).steps_to_crossing(0.25, 200)
        assert (crossing.steps, crossing.signal) == (200, "none")


def test_devices_that_come_and_go_shorten_the_horizon():
    healthy = [DEVICES if i // 5 % 2 == 0 else DEVICES[:3] for i in range(30)]
    crossing = seen([100.0] * 30, healthy).steps_to_crossing(0.25, 200)
    assert crossing.signal == "devices"
    assert crossing.steps == pytest.approx(30 / 5)


def test_announced_leaving_counts_as_a_change_of_supply():
    one = seen([100.0] * 5)
    stats = TokenStats(100, 100, 100, 100, 8)
    draining = Observation(5, 1.0, {}, stats, stats, {}, frozenset(DEVICES), frozenset(DEVICES[:1]))
    assert one.seen(draining).supply_changes == 1


def test_the_cap_bounds_every_answer():
    crossing = seen([100 + 0.01 * i for i in range(20)]).steps_to_crossing(0.25, 50)
    assert (crossing.steps, crossing.signal) == (50, "none")


def test_a_step_seen_again_replaces_what_was_seen_of_it():
    once = seen([100.0, 101.0])
    stats = TokenStats(150, 150, 150, 150, 8)
    again = once.seen(Observation(1, 1.0, {}, stats, stats, {}, frozenset(DEVICES)))
    assert again.tokens == ((0, 100.0), (1, 150))
