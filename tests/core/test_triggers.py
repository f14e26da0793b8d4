"""Each signal wakes the controller once, and again only when it has moved."""

from dataclasses import replace

from nereus_core.cluster import Device
from nereus_core.config import PolicyConfig
from nereus_core.triggers import Signals, Trigger, Triggers

QUIET = Signals(
    devices_changed=False,
    memory_problem=None,
    peak_bytes={Device("n", 0): 50},
    capacity_bytes=100,
    response_tokens_mean=100.0,
    step_s=1.0,
    predicted_s=1.0,
)


def woken(*signals, start=None):
    """Feed boundaries; a trigger is followed by a decision, as the controller does."""
    triggers, found = start or Triggers(PolicyConfig(), 100.0), []
    for signal in signals:
        triggers, trigger = triggers.seen(signal)
        found.append(trigger)
        if trigger is not None:
            triggers = triggers.decided(signal.response_tokens_mean or triggers.tokens_mean)
    return found


def tokens(mean):
    return replace(QUIET, response_tokens_mean=mean)


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
    assert woken(replace(QUIET, response_tokens_mean=None)) == [None]


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
    signals = replace(tokens(200), devices_changed=True, memory_problem="too small")
    assert woken(signals) == [Trigger.DEVICES]
