"""Each signal wakes the controller once, and again only when it has moved."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nereus_core.cluster import Device
from nereus_core.config import PolicyConfig
from nereus_core.triggers import (
    PATIENCE_STEPS,
    Levels,
    Signals,
    Trigger,
    Triggers,
    quiet_amplitude,
)
from nereus_core.workload import ModelStage

QUIET = Signals(
    devices=None,
    memory_problem=None,
    peak_bytes={Device("n", 0): 50},
    capacity_bytes=100,
    tokens_mean=100.0,
    step_s=1.0,
    predicted_s=1.0,
)


def woken(*signals, start=None):
    """Feed boundaries; a trigger is followed by a decision, as the controller does."""
    triggers, found = start or Triggers(PolicyConfig(), Levels(100.0)), []
    for signal in signals:
        triggers, wake = triggers.seen(signal)
        found.append(wake and wake.trigger)
        if wake is not None:
            triggers = triggers.decided(signal.tokens_mean or triggers.levels.tokens_mean)
    return found


def tokens(mean):
    return replace(QUIET, tokens_mean=mean)


def test_nothing_wakes_a_steady_job():
    assert woken(QUIET, tokens(120), tokens(80)) == [None] * 3


def test_tokens_are_measured_from_the_last_decision():
    assert woken(tokens(120), tokens(126), tokens(130), tokens(90)) == [
        None,
        Trigger.TOKENS,
        None,
        Trigger.TOKENS,
    ]


def test_a_step_that_was_not_completed_moves_no_tokens():
    assert woken(replace(QUIET, tokens_mean=None)) == [None]


def test_one_slow_step_is_noise_and_two_are_not():
    slow = replace(QUIET, step_s=2.0)
    assert woken(slow, QUIET, slow, slow, slow) == [None, None, None, Trigger.EFFICIENCY, None]


def test_an_unknown_prediction_is_never_off():
    slow = replace(QUIET, step_s=2.0, predicted_s=None)
    assert woken(slow, slow, slow) == [None] * 3


def test_a_peak_in_the_headroom_wakes_once_until_it_has_gone():
    tight = replace(QUIET, peak_bytes={Device("n", 0): 95})
    assert woken(tight, tight, QUIET, tight) == [Trigger.MEMORY, None, None, Trigger.MEMORY]
    assert woken(replace(QUIET, memory_problem="n:0 lacks 1 GiB")) == [Trigger.MEMORY]


def test_devices_come_before_all_else():
    signals = replace(tokens(200), devices="devices: 1 left", memory_problem="too small")
    assert woken(signals) == [Trigger.DEVICES]


TRAIN, GENERATE = ModelStage.parse("actor/train"), ModelStage.parse("actor/generate")


def test_a_longer_tail_at_the_same_mean_wakes_after_some_steps():
    short, long = replace(QUIET, tokens_p95=150.0), replace(QUIET, tokens_p95=220.0)
    assert woken(short, long, short, long, long, long) == [
        None, None, None, None, Trigger.TOKENS, None
    ]  # fmt: skip


def test_responses_that_begin_to_be_clipped_wake():
    free, clipped = replace(QUIET, clip_ratio=0.01), replace(QUIET, clip_ratio=0.3)
    assert woken(free, clipped, clipped) == [None, None, Trigger.TOKENS]


def test_an_achieved_efficiency_that_drops_wakes():
    good, bad = replace(QUIET, efficiency={"gemm": 0.5}), replace(QUIET, efficiency={"gemm": 0.2})
    assert woken(good, bad, bad) == [None, None, Trigger.EFFICIENCY]


def test_another_bottleneck_wakes_and_another_plan_starts_anew():
    train = replace(QUIET, stage_s={TRAIN: 8.0, GENERATE: 2.0})
    generate = replace(QUIET, stage_s={TRAIN: 5.0, GENERATE: 5.0})
    assert woken(train, generate, generate) == [None, None, Trigger.BALANCE]
    moved = Triggers(PolicyConfig(), Levels(100.0)).seen(train)[0].changed()
    assert woken(generate, generate, start=moved) == [None, None]


def test_memory_is_relaxed_only_well_below_the_headroom():
    tight = replace(QUIET, peak_bytes={Device("n", 0): 91})
    nearly = replace(QUIET, peak_bytes={Device("n", 0): 89})
    assert woken(tight, nearly, tight, nearly, tight) == [Trigger.MEMORY, None, None, None, None]


def test_a_wake_says_what_moved_from_where_to_where():
    _, wake = Triggers(PolicyConfig(), Levels(100.0)).seen(tokens(150))
    assert wake.why == "mean response tokens 100 -> 150 (+50%, threshold 25%)"


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=60),
    st.floats(10, 10_000),
    st.floats(0.05, 0.6),
)
def test_nothing_flaps_under_noise_of_the_quiet_amplitude(noise, level, threshold):
    """After the first look, signals that swing by less than the amplitude wake nobody."""
    policy = PolicyConfig(tokens_change=threshold, efficiency_change=threshold)
    amplitude = 0.999 * quiet_amplitude(threshold)
    triggers = Triggers(policy, Levels(level)).decided(level * (1 + amplitude * noise[0]))
    for part in noise[1:]:
        swing = level * (1 + amplitude * part)
        triggers, wake = triggers.seen(
            replace(
                QUIET,
                tokens_mean=swing,
                tokens_p95=2 * swing,
                step_s=1 + amplitude * part,
                efficiency={"gemm": 0.5 * (1 + amplitude * part)},
            )
        )
        assert wake is None


@given(st.integers(0, 30), st.floats(1.6, 4.0))
def test_a_noisy_signal_is_reported_once_for_a_lasting_change(before, factor):
    slow = replace(QUIET, step_s=factor)
    found = woken(*[QUIET] * before, *[slow] * PATIENCE_STEPS)
    assert found == [None] * (before + PATIENCE_STEPS - 1) + [Trigger.EFFICIENCY]
