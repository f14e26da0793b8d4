"""The controller when devices are lost, announced to leave, or new."""

import pytest
from watched import Watched, big_job, good_plan, packed

from nereus_core.errors import (
    Infeasible,
    NoFeasiblePlan,
    StateLost,
    TransitionFailed,
    UnitLost,
)
from nereus_core.events import (
    Decided,
    DevicesChanged,
    InputIgnored,
    TransitionFinished,
    TransitionStarted,
)
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.primitives import Extend, created
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER


def generating_apart():
    """A job that generates on the first two of its devices alone, and those devices."""
    job = big_job()
    d = job.cluster.devices
    plan = Plan(
        {
            ACTOR_GENERATE: Placement.packed(Layout(2, 1), d[:2]),
            ACTOR_TRAIN: Placement.packed(Layout(4, 1), d[4:]),
            REF_INFER: Placement.packed(Layout(4, 1), d[4:]),
        }
    )
    return Watched(job, plan), d


def test_a_lost_device_is_survived_and_taken_back_when_it_returns():
    job = big_job()
    watched = Watched(job, good_plan(job, 1500))
    watched.run(1500, 1500)
    gone = job.cluster.devices[3]
    watched.job.fail(gone)
    decision, *_ = watched.run(1500)
    assert (decision.path, decision.trigger, decision.admitted) == ("urgent", "devices", True)
    assert gone not in watched.controller.plan.devices
    changed = watched.of(DevicesChanged)[-1]
    assert changed.lost == (str(gone),)
    assert changed.lost_units
    watched.run(1500, 1500, 1500)
    watched.job.give_back(gone)
    watched.run(*[1500] * 6)
    assert watched.of(DevicesChanged)[-1].returned == (str(gone),)
    assert gone in watched.controller.plan.devices
    assert watched.job.step_number == 11
    made = [u.id for kind, op in watched.job.adapter.log if kind == "done" for u in created(op)]
    assert len(made) == len(set(made)), "an id was used twice"


def test_devices_that_the_job_did_not_start_with_are_used_at_the_boundary_they_come():
    job, larger = big_job(4), big_job(8)
    watched = Watched(job, packed(job, generate=(4, 1), train=(4, 1), ref=(4, 1)))
    watched.run(*[1500] * 4)
    assert len(watched.controller.plan.devices) == 4
    watched.job.grow(larger)
    decision, *_ = watched.run(1500)
    assert decision.trigger == "devices"
    new = set(larger.cluster.devices) - set(job.cluster.devices)
    assert watched.of(DevicesChanged)[-1].returned == tuple(map(str, sorted(new)))
    assert not watched.of(InputIgnored)
    watched.run(*[1500] * 6)
    assert new <= watched.controller.plan.devices


def test_nobody_can_veto_what_is_urgent():
    job = big_job()
    watched = Watched(job, good_plan(job, 1500), veto=lambda decision: "never")
    watched.job.fail(job.cluster.devices[3])
    decision, *_ = watched.run(1500)
    assert decision.admitted
    assert watched.job.step_number == 0


def test_a_draining_device_is_left_before_it_goes():
    job = big_job()
    watched = Watched(job, good_plan(job, 1500))
    watched.run(1500)
    leaving = job.cluster.devices[:2]
    watched.job.drain(*leaving)
    (decision,) = watched.run(1500)
    assert decision.path == "urgent"
    assert watched.controller.plan.devices.isdisjoint(leaving)
    assert not watched.of(DevicesChanged)[-1].lost_units


def test_a_generate_stage_whose_units_are_all_lost_comes_back_from_training():
    watched, d = generating_apart()
    watched.job.fail(*d[:2])
    watched.run(1000)
    assert not plan_problems(watched.controller.plan, watched.job.adapter.job())
    assert watched.job.step_number == 0


def test_a_reference_whose_units_are_all_lost_is_loaded_again():
    job = big_job()
    d = job.cluster.devices
    plan = Plan(
        {
            ACTOR_GENERATE: Placement.packed(Layout(4, 1), d[4:]),
            ACTOR_TRAIN: Placement.packed(Layout(4, 1), d[4:]),
            REF_INFER: Placement.packed(Layout(2, 1), d[:2]),
        }
    )
    watched = Watched(job, plan)
    watched.job.fail(*d[:2])
    watched.run(1000)
    assert not plan_problems(watched.controller.plan, watched.job.adapter.job())
    assert watched.job.step_number == 0


def test_a_train_stage_without_an_intact_unit_is_a_named_loss():
    job = big_job()
    watched = Watched(job, packed(job, generate=(1, 1), train=(8, 1), ref=(8, 1)))
    watched.job.fail(job.cluster.devices[0])
    with pytest.raises(StateLost, match="actor/train"):
        watched.run(1000)


def test_nothing_fits_on_what_is_left():
    job = big_job()
    d = job.cluster.devices
    plan = packed(job, generate=(4, 1), train=(4, 1), ref=(4, 1))
    watched = Watched(job, plan)
    watched.job.fail(*d[:4], *d[5:])
    with pytest.raises((NoFeasiblePlan, StateLost)):
        watched.run(1000)


def test_a_device_lost_during_the_transition_leads_to_another_plan():
    job = big_job()
    plan = packed(job, generate=(1, 1), train=(4, 1), ref=(4, 1))
    watched = Watched(job, plan)
    d = job.cluster.devices
    struck = []

    def strike(op, phase):
        if phase == "commit" and not struck and isinstance(op, Extend):
            struck.append(op)
            watched.job.fail(d[1])
            raise UnitLost([op.unit.id], tuple(watched.job.adapter.units()), "seat gone")

    watched.job.adapter.fault = strike
    watched.job.drain(d[7])
    watched.run(1000)
    if struck:
        assert [e.outcome for e in watched.of(TransitionFinished)] == ["failed", "done"]
        assert {d[1], d[7]}.isdisjoint(watched.controller.plan.devices)
    assert not plan_problems(watched.controller.plan, watched.job.adapter.job())
    watched.run(1000)


def test_a_loss_reported_after_a_primitive_was_done_still_ends_in_a_linked_plan():
    job = big_job()
    watched = Watched(job, packed(job, generate=(2, 1), train=(4, 1), ref=(4, 1)))
    adapter, struck = watched.job.adapter, []
    truth = adapter._commit

    def late(op, atlas):
        receipt = truth(op, atlas)
        if not struck:
            struck.append(op)
            raise UnitLost([], tuple(adapter.units()), "another seat ended")
        return receipt

    adapter._commit = late
    watched.job.drain(job.cluster.devices[7])
    watched.run(1000)
    assert [e.outcome for e in watched.of(TransitionFinished)] == ["failed", "done"]
    assert adapter.plan_linked == watched.controller.plan == Plan.of_units(adapter.units())


def test_lost_devices_end_the_run_after_three_attempts():
    job = big_job()
    watched = Watched(job, packed(job, generate=(1, 1), train=(2, 1), ref=(2, 1)))

    def strike(op, phase):
        if phase == "prepare":
            raise UnitLost([], tuple(watched.job.adapter.units()), "seat gone")

    watched.job.adapter.fault = strike
    watched.job.drain(job.cluster.devices[7])
    with pytest.raises(TransitionFailed):
        watched.run(1000)
    assert len(watched.of(TransitionStarted)) == 3


def test_a_change_that_is_refused_after_a_loss_is_no_way_back_to_what_was_lost():
    watched, d = generating_apart()
    watched.run(1500)
    first = len(watched.of(TransitionStarted))

    def refuse(op, phase):
        tried = len(watched.of(TransitionStarted)) - first
        if phase == "prepare" and tried <= 2:
            raise Infeasible("another job has just taken it")

    watched.job.adapter.fault = refuse
    watched.job.fail(d[0])
    watched.run(1500)
    assert [e.outcome for e in watched.of(TransitionFinished)][-1] == "done"
    assert ACTOR_GENERATE in watched.controller.plan
    assert not plan_problems(watched.controller.plan, watched.job.adapter.job())


def test_devices_that_the_plan_does_not_use_may_come_and_go_without_a_loss():
    """What other jobs do with free devices ends no saving; only what comes is thought about."""
    job = big_job()
    d = job.cluster.devices
    plan = packed(job.on(job.cluster.without(d[4:])), generate=(4, 1), train=(4, 1), ref=(4, 1))
    watched = Watched(job, plan, config={"mode": "advise"})
    for _ in range(10):
        watched.run(1500, 1500)
        watched.job.fail(d[7])
        watched.run(1500)
        watched.job.give_back(d[7])
    decisions = watched.of(Decided)
    woken = [e for e in decisions if e.trigger == "devices"]
    assert woken
    assert not [e for e in woken if "left" in e.signal]
    assert decisions[-1].horizon_steps > 30
