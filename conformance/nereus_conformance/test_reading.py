"""What an adapter says of a job."""

from __future__ import annotations

import threading

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import partitioned, require, uniform
from nereus_core.capabilities import Feature
from nereus_core.layout import Layout
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Stage

QUIET_S = 5.0
"""Reading a few objects takes far less; a read that takes longer waits for the step. Chosen, not
measured."""


def test_units_partition_the_devices_of_a_stage(arrange: Arranger) -> None:
    """I1: every device of a stage belongs to exactly one unit, those the plan put there.

    If this fails, check how units are read when a stage has several.
    """
    subject = arrange(Stage.TRAIN, num_units=2)
    partitioned(subject.units, subject)
    for stage, placement in subject.plan.items():
        held = {d for unit in subject.units.of(stage) for d in unit.devices}
        require(held == placement.devices, "I1 devices", f"{stage} is on {held}")


def test_units_of_a_stage_share_one_layout(arrange: Arranger) -> None:
    """I3: all units of a stage have the layout that the plan gave it.

    If this fails, check where a unit's layout is read.
    """
    subject = arrange(Stage.TRAIN, Layout(2, 1))
    uniform(subject.units)
    for stage, placement in subject.plan.items():
        for unit in subject.units.of(stage):
            require(
                unit.layout == placement.layout,
                "I3 uniform",
                f"{unit.id} is {unit.layout}, launched as {placement.layout}",
            )


@pytest.mark.needs(Feature.PIPELINE_STAGES)
def test_unit_has_tp_times_pp_devices(arrange: Arranger) -> None:
    """A unit holds as many devices as its layout says, in the plan's order of local rank.

    If this fails, check that devices are listed by local rank = pp_rank * tp + tp_rank.
    """
    subject = arrange(Stage.TRAIN, Layout(1, 2))
    for stage, placement in subject.plan.items():
        found = {unit.devices for unit in subject.units.of(stage)}
        require(
            found == set(placement.units), "I1 devices", f"{stage} is on {found}, not {placement}"
        )


@pytest.mark.needs(Feature.UNIT_LOSS)
def test_units_are_read_from_the_framework_not_a_cache(arrange: Arranger) -> None:
    """A unit that the framework lost is not listed, although nobody told the adapter.

    If this fails, check that units() asks the framework each time.
    """
    subject = arrange(Stage.TRAIN, num_units=2)
    lost = subject.own()[1]
    subject.harness.fail(lost.devices[0])
    require(
        lost.id not in subject.units,
        "I4 strong",
        f"units() still lists {lost.id}, whose device is gone",
    )


def test_job_matches_what_was_launched(arrange: Arranger) -> None:
    """job() tells the algorithm, shapes, batch and devices of the job that runs.

    If this fails, check which object of the framework job() reads.
    """
    subject = arrange()
    found, wanted = subject.adapter.job(), subject.job
    assert found.workload == wanted.workload
    assert found.global_batch == wanted.global_batch
    assert set(found.cluster.healthy) == set(wanted.cluster.healthy)
    for stage in wanted.workload.stages:
        assert found.model(stage).num_params == wanted.model(stage).num_params


def test_observe_reports_tokens_seconds_and_bytes(arrange: Arranger) -> None:
    """After a step, observe() tells its tokens, its seconds by stage, and who is healthy.

    If this fails, check what is recorded while a step runs.
    """
    subject = arrange()
    subject.step()
    seen = subject.adapter.observe()
    assert seen.step == 0
    assert seen.step_s > 0
    assert set(seen.stage_s) == set(subject.job.workload.stages)
    assert all(seconds >= 0 for seconds in seen.stage_s.values())
    assert seen.response_tokens.count >= subject.job.global_batch
    assert 0 < seen.response_tokens.mean <= seen.response_tokens.max
    assert seen.response_tokens.max <= subject.job.max_response_tokens
    assert 0 < seen.prompt_tokens.max <= subject.job.max_prompt_tokens
    assert seen.healthy == frozenset(subject.job.cluster.healthy)


def test_observe_drains_its_window(arrange: Arranger) -> None:
    """What was reported once is not reported again.

    If this fails, check that observe() empties what it returns.
    """
    subject = arrange()
    subject.step()
    subject.adapter.observe()
    again = subject.adapter.observe()
    assert again.step == 0
    assert again.response_tokens.count == 0
    assert not again.stage_s


@pytest.mark.needs(Feature.MEMORY_PROBE)
def test_peak_memory_agrees_with_the_device(arrange: Arranger) -> None:
    """The reported peak of a device is no less than what lies there, and no more than it has.

    If this fails, check the unit of the probe (bytes) and when its window is reset.
    """
    subject = arrange()
    subject.step()
    peaks = subject.adapter.observe().peak_bytes
    capacity = subject.job.cluster.device_spec.memory_bytes
    for device, resident in subject.memory().items():
        if resident:
            assert resident <= peaks[device] <= capacity, f"{device}: {peaks[device]}, {resident}"


@pytest.mark.needs(Feature.EFFICIENCY_PROBE)
def test_efficiencies_lie_in_zero_one(arrange: Arranger) -> None:
    """Achieved over peak is a part: above 0, at most 1.

    If this fails, check the peak that the probe divides by (dense, not sparse).
    """
    subject = arrange()
    subject.step()
    found = subject.adapter.observe().efficiency
    assert found
    assert all(0 < value <= 1 for value in found.values()), found


def test_reads_do_not_delay_a_step(arrange: Arranger) -> None:
    """I9: job, units and observe answer while a step is in flight.

    If this fails, check that no read waits for a lock or a device that a step holds.
    """
    subject = arrange()
    answered: list[str] = []

    def read() -> None:
        subject.adapter.job()
        answered.append("job")
        subject.adapter.units()
        answered.append("units")
        subject.adapter.observe()
        answered.append("observe")

    reader = threading.Thread(target=read, daemon=True)
    with subject.harness.running(ACTOR_TRAIN):
        reader.start()
        reader.join(QUIET_S)
        in_time = list(answered)
    require(
        in_time == ["job", "units", "observe"],
        "I9 quiet",
        f"while a step was in flight only {in_time} answered",
    )


@pytest.mark.needs(Feature.FINGERPRINT)
def test_fingerprint_depends_on_state_alone(arrange: Arranger) -> None:
    """Equal state has equal digests whatever the layout; one tensor that differs shows as that one.

    If this fails, check that digests are taken by logical position, not by rank or storage.
    """
    subject = arrange(Stage.TRAIN, Layout(2, 1))
    train, generate = subject.own()[0], subject.units.of(ACTOR_GENERATE)[0]
    first = subject.adapter.fingerprint(train.id).tensors
    other = subject.adapter.fingerprint(generate.id).tensors
    assert set(first) == set(subject.state(train))
    assert {k: v for k, v in first.items() if k.startswith("param/")} == other
    name = sorted(other)[0]
    subject.harness.disturb(train.id, name)
    changed = subject.adapter.fingerprint(train.id).tensors
    assert {k for k in first if first[k] != changed[k]} == {name}
