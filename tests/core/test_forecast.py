import math
import random

import pytest

from nereus_core.cluster import Device
from nereus_core.forecast import Forecaster
from nereus_core.observation import Observation, TokenStats

DEVICES = [Device("node0", i) for i in range(4)]


def seen(tokens, losses=()):
    found = Forecaster()
    for step, mean in enumerate(tokens):
        stats = TokenStats(mean, mean, mean, math.ceil(mean), 8)
        found = found.seen(Observation(step, 1.0, {}, stats, stats, {}, frozenset(DEVICES)))
        if step in losses:
            found = found.lost()
    return found


def quiet(steps=100_000):
    """Tokens over so many steps that devices are known to stay."""
    return Forecaster(first_step=-steps, last_step=-1)


def after_quiet(tokens):
    found = quiet()
    for step, mean in enumerate(tokens):
        stats = TokenStats(mean, mean, mean, math.ceil(mean), 8)
        found = found.seen(Observation(step, 1.0, {}, stats, stats, {}, frozenset(DEVICES)))
    return found


def test_steady_growth_crosses_after_threshold_over_slope():
    crossing = after_quiet([100 + 2 * i for i in range(20)]).steps_to_crossing(0.25, 200)
    assert crossing.steps == pytest.approx(0.25 * 138 / 2, abs=1)
    assert crossing.low_steps == pytest.approx(crossing.high_steps, abs=1)
    assert crossing.signal == "tokens"


def test_shrinking_responses_cross_too():
    crossing = after_quiet([200 - 2 * i for i in range(20)]).steps_to_crossing(0.25, 200)
    assert crossing.steps == pytest.approx(0.25 * 162 / 2, abs=1)


def test_steady_lengths_on_steady_devices_never_cross_and_the_cap_applies():
    crossing = after_quiet([100.0] * 20).steps_to_crossing(0.25, 200)
    assert crossing.steps == pytest.approx(200, rel=1e-2)
    assert crossing.signal == "none"


def test_noise_hardly_moves_the_expectation_and_widens_the_interval():
    noise = random.Random(0)
    crossing = after_quiet([100 + 2 * i + noise.gauss(0, 4) for i in range(32)]).steps_to_crossing(
        0.25, 200
    )
    assert crossing.steps == pytest.approx(0.25 * 162 / 2, rel=0.15)
    assert crossing.low_steps < crossing.steps < crossing.high_steps


def test_one_outlier_does_not_turn_the_trend():
    tokens = [100.0 + i for i in range(20)]
    clean = after_quiet(tokens).trend().slope
    tokens[17] = 900.0
    assert after_quiet(tokens).trend().slope == pytest.approx(clean, rel=0.05)


def test_a_change_of_level_is_forgotten_after_the_newest_window():
    noise = random.Random(1)
    tokens = [100 + noise.gauss(0, 2) for _ in range(40)]
    tokens += [300 + noise.gauss(0, 2) for _ in range(8)]
    trend = after_quiet(tokens).trend()
    assert trend.level == pytest.approx(300, rel=0.05)
    assert trend.steps == 8


def test_a_long_steady_past_is_all_used():
    noise = random.Random(2)
    trend = after_quiet([100 + noise.gauss(0, 2) for _ in range(100)]).trend()
    assert trend.steps == 64
    assert abs(trend.slope) < 3 * trend.slope_deviation + 0.05


def test_stated_quantiles_cover_what_happens():
    """Random walks: the first crossing lies above low_steps about as often as was said."""
    rng, above, trials = random.Random(3), 0, 200
    for _ in range(trials):
        level, path = 1000.0, []
        for _ in range(300):
            level += rng.gauss(4, 12)
            path.append(level)
        low = after_quiet(path[:40]).steps_to_crossing(0.25, 200, confidence=0.9).low_steps
        start = path[39]
        crossed = next((i for i, v in enumerate(path[40:]) if abs(v - start) > 0.25 * start), 200)
        above += crossed >= low
    assert above / trials > 0.8


def test_before_there_is_a_trend_only_devices_and_the_job_bound_the_horizon():
    for tokens in ([], [100.0], [100.0, 140.0, 180.0]):
        crossing = after_quiet(tokens).steps_to_crossing(0.25, 200)
        assert crossing.steps == pytest.approx(200, rel=1e-2)
        assert crossing.signal == "none"


def test_a_supply_that_was_only_just_met_is_not_trusted_to_the_cap():
    """The horizon grows with the time over which devices have been seen to stay."""
    horizons = [seen([100.0] * n).steps_to_crossing(0.25, 200).steps for n in (1, 5, 20, 100, 1000)]
    assert horizons == sorted(horizons)
    assert horizons[0] < 50
    assert horizons[-1] > 180


def test_devices_that_leave_shorten_the_horizon():
    crossing = seen([100.0] * 30, losses=(5, 15, 25)).steps_to_crossing(0.25, 200)
    assert crossing.signal == "devices"
    # A rate of 3 losses in 30 steps, and what half a loss of prior adds.
    assert crossing.steps == pytest.approx(31 / 2.5, rel=0.1)
    assert crossing.low_steps < crossing.steps < crossing.high_steps


def test_no_saving_outlives_the_job():
    steady = after_quiet([100.0] * 20)
    crossing = steady.steps_to_crossing(0.25, 200, remaining_steps=7)
    assert crossing.steps == pytest.approx(7, rel=1e-2)
    assert crossing.signal == "end"
    assert steady.steps_to_crossing(0.25, 200, remaining_steps=0).steps == 0
    assert steady.steps_to_crossing(0.25, 200, remaining_steps=900).signal == "none"


def test_a_step_seen_again_replaces_what_was_seen_of_it():
    once = seen([100.0, 101.0])
    stats = TokenStats(150, 150, 150, 150, 8)
    again = once.seen(Observation(1, 1.0, {}, stats, stats, {}, frozenset(DEVICES)))
    assert again.tokens == ((0, 100.0), (1, 150))
