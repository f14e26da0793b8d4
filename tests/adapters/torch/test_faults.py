"""Seats that die, raise or hang: what is lost is named, the rest is as it was, the job goes on."""

import os
import signal

import pytest

from nereus_adapters.torch.faults import FaultInjected
from nereus_core.errors import UnitLost
from nereus_core.layout import Layout
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

pytestmark = pytest.mark.real


@pytest.fixture
def adapter(harness, tools):
    """actor/train on seats 0 and 1, twice; the rest on seat 0."""
    job = harness.job()
    return harness.launch(job, tools.packed(job, {ACTOR_TRAIN: (Layout(1, 1), 2)}))


def arm(harness, device, phase, kind):
    harness.pool.call(device, "fail_at", phase=phase, kind=kind).wait(60)


@pytest.mark.parametrize("phase", ["prepare", "transfer", "verify"])
def test_an_error_before_commit_leaves_everything_as_it_was(harness, tools, adapter, phase):
    hand = tools.Hand(adapter)
    harness.step()
    units = adapter.units()
    before = {u: tools.sha256(harness.peek(u)) for u in units}
    held = {d: harness.memory_bytes(d) for d in hand.devices}
    with tools.at_boundary(adapter):
        arm(harness, hand.devices[1], phase, "raise")
        with pytest.raises(FaultInjected, match=phase):
            hand.merge(Layout(2, 1), [0, 1])
        assert adapter.units() == units
        assert {u: tools.sha256(harness.peek(u)) for u in units} == before
        assert {d: harness.memory_bytes(d) for d in hand.devices} == held
        hand.merge(Layout(2, 1), [0, 1])
    harness.step()


def test_an_error_at_commit_is_tried_again(harness, tools, adapter):
    hand = tools.Hand(adapter)
    before = tools.sha256(harness.peek(hand.ids(ACTOR_TRAIN)[0]))
    with tools.at_boundary(adapter):
        arm(harness, hand.devices[1], "commit", "raise")
        hand.merge(Layout(2, 1), [0, 1])
    assert tools.sha256(harness.peek(hand.ids(ACTOR_TRAIN)[0])) == before


@pytest.mark.parametrize("phase", ["transfer", "commit"])
def test_a_seat_that_dies_in_a_primitive_takes_only_its_units(harness, tools, adapter, phase):
    """Seat 1 dies while unit 0 becomes one on seats 2 and 3 and unit 1 stands beside."""
    hand = tools.Hand(adapter)
    harness.step()
    first, second = hand.ids(ACTOR_TRAIN)
    before = tools.sha256(harness.peek(first))
    with tools.at_boundary(adapter):
        arm(harness, hand.devices[1], phase, "kill")
        with pytest.raises(UnitLost) as caught:
            hand.extend(Layout(2, 1), [2, 3])
        assert caught.value.lost == (second,)
        assert first in caught.value.intact
        assert set(adapter.units()) == set(caught.value.intact)
        assert tools.sha256(harness.peek(first)) == before
        assert adapter.job().cluster.failed == {hand.devices[1]}
        assert hand.devices[1] not in adapter.observe().healthy
        if phase != "commit":
            hand.extend(Layout(1, 1), [2])
    harness.running_job.give([hand.devices[1]])
    assert adapter.job().cluster.failed == frozenset()
    with tools.at_boundary(adapter):
        if phase == "commit":  # the new unit stands: it goes on alone
            hand.destroy(0)
        else:
            hand.extend(Layout(1, 1), [1])
    assert len(harness.step().losses) == 1


def test_a_seat_that_hangs_is_ended_and_named(harness, tools, adapter):
    from dataclasses import replace

    running = harness.running_job
    running.settings = replace(running.settings, transfer_s=1.0)
    hand = tools.Hand(adapter)
    lost = hand.ids(ACTOR_TRAIN)[1]
    with tools.at_boundary(adapter):
        arm(harness, hand.devices[1], "verify", "hang")
        with pytest.raises(
            UnitLost, match=r"waited 1 s for seat node0:1 to finish verify"
        ) as caught:
            hand.merge(Layout(2, 1), [0, 1])
        assert caught.value.lost == (lost,)
    harness.running_job.give([hand.devices[1]])


@pytest.mark.parametrize("method", ["generate", "train", "sync"])
def test_a_step_that_loses_a_seat_goes_on_where_it_was(harness, tools, method):
    """The figures of the whole run equal those of a run that lost nothing."""
    job = harness.job()
    two = (Layout(1, 1), 2)
    plan = tools.packed(job, {ACTOR_TRAIN: two, ACTOR_GENERATE: two, REF_INFER: two})

    def figures():
        metrics = adapter.observe().metrics
        return {k: metrics[k] for k in ("reward", "actor/loss", "actor/grad_norm")}

    adapter = harness.launch(job, plan)
    fixed = []
    for _ in range(4):
        harness.step()
        fixed.append(figures())

    adapter = harness.launch(job, plan)
    hand, found = tools.Hand(adapter), []
    for _ in range(2):
        harness.step()
        found.append(figures())
    arm(harness, hand.devices[1], method, "kill")
    with pytest.raises(UnitLost) as caught:
        harness.step()
    assert {u.serial for u in caught.value.lost} == {1}
    with pytest.raises(UnitLost):
        harness.step()  # until relinked
    with tools.at_boundary(adapter):
        hand.extend(Layout(1, 1), [2])
        hand.extend(Layout(1, 1), [2], ACTOR_GENERATE, sources=hand.ids(ACTOR_TRAIN))
        hand.extend(Layout(1, 1), [2], REF_INFER)
    for _ in range(2):
        harness.step()
        found.append(figures())
    harness.running_job.give([hand.devices[1]])
    for one, other in zip(fixed, found, strict=True):
        assert other == pytest.approx(one, abs=1e-9)


def test_an_error_in_a_step_leaves_a_job_that_steps(harness, tools, adapter):
    arm(harness, adapter.job().cluster.devices[1], "train", "raise")
    with pytest.raises(FaultInjected):
        harness.step()
    assert harness.step().step == 0


def test_a_replica_that_missed_an_update_is_dropped(harness, tools, adapter):
    """All replicas or none: one that is behind the others is lost, to be extended again."""
    hand = tools.Hand(adapter)
    harness.step()
    first, second = hand.ids(ACTOR_TRAIN)
    harness.pool.call(hand.devices[0], "set_counter", unit=first, name="step", value=2).wait(60)
    arm(harness, hand.devices[0], "generate", "raise")
    with pytest.raises(UnitLost) as caught:
        harness.step()
    assert caught.value.lost == (second,)


def test_devices_that_leave_are_drained_first(harness, tools, adapter):
    hand, running = tools.Hand(adapter), harness.running_job
    running.take([hand.devices[1]])
    seen = adapter.observe()
    assert seen.draining == {hand.devices[1]}
    assert hand.devices[1] in seen.healthy
    harness.step()
    with tools.at_boundary(adapter):
        hand.destroy(1)
    seen = adapter.observe()
    assert seen.draining == frozenset()
    assert hand.devices[1] not in seen.healthy
    harness.step()
    running.give([hand.devices[1]])
    assert hand.devices[1] in adapter.observe().healthy
    with tools.at_boundary(adapter):
        hand.extend(Layout(1, 1), [1])
    harness.step()


def test_a_loss_elsewhere_does_not_fail_a_primitive(harness, tools, adapter):
    hand = tools.Hand(adapter)
    with tools.at_boundary(adapter):
        hand.extend(Layout(1, 1), [3])
        harness.fail(hand.devices[3])
        parents = hand.ids(ACTOR_TRAIN)
        hand.merge(Layout(2, 1), [0, 1], parents=parents)
        with pytest.raises(UnitLost):
            harness.step()
    harness.running_job.give([hand.devices[3]])
    harness.step()


def test_a_wide_unit_that_loses_another_seat_does_not_fail_a_primitive(harness, tools):
    job = harness.job()
    placements = {ACTOR_TRAIN: (Layout(1, 1), 2), ACTOR_GENERATE: (Layout(4, 1), 1)}
    adapter = harness.launch(job, tools.packed(job, placements))
    hand = tools.Hand(adapter)
    with tools.at_boundary(adapter):
        harness.fail(hand.devices[3])  # actor/generate was on seats 0 and 1 too
        hand.merge(Layout(2, 1), [0, 1], parents=hand.ids(ACTOR_TRAIN))
        assert [u.layout for u in adapter.units().of(ACTOR_TRAIN)] == [Layout(2, 1)]
        assert not adapter.units().of(ACTOR_GENERATE)


def test_a_seat_that_stands_still_in_a_step_is_ended_and_named(pool, tools):
    """Stopped, all its threads with it: only the wait for it ends, and then the seat."""
    harness = tools.TorchHarness(pool=pool, wait_s=6.0)
    job = harness.job()
    adapter = harness.launch(job, tools.packed(job, {ACTOR_TRAIN: (Layout(1, 1), 2)}))
    first, second = tools.Hand(adapter).ids(ACTOR_TRAIN)
    stopped = job.cluster.devices[1]
    os.kill(pool.pid(stopped), signal.SIGSTOP)
    with pytest.raises(UnitLost, match=f"for seat {stopped} to finish") as caught:
        harness.step()
    assert caught.value.lost == (second,)
    assert first in caught.value.intact
    assert stopped not in pool.alive
    harness.running_job.relink()
    assert harness.step().step == 0
    harness.close()
    pool.start([stopped])
