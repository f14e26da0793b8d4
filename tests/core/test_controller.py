"""The controller on a job in memory: it adapts, refuses, recovers, and says why."""

from dataclasses import replace

import pytest
from plans import tiny_job
from watched import Watched, big_job, good_plan, packed

from nereus_core.cost import CostModel, Lengths
from nereus_core.errors import (
    BoundaryTimeout,
    Infeasible,
    TransitionFailed,
)
from nereus_core.events import (
    Decided,
    PrimitiveFinished,
    RunFinished,
    RunStarted,
    StepObserved,
    TransitionFinished,
    TransitionStarted,
)
from nereus_core.observation import TokenStats
from nereus_core.plan import Plan
from nereus_core.workload import ACTOR_TRAIN


def test_a_poor_plan_is_left_for_a_better_one_and_the_job_steps_faster():
    job = big_job()
    watched = Watched(job, packed(job, generate=(8, 1), train=(2, 4), ref=(8, 1)))
    before = watched.controller.plan
    watched.run(*[1500] * 6)
    steps = watched.of(StepObserved)
    assert watched.controller.plan != before
    assert steps[-1].step_s < steps[0].step_s
    assert watched.of(TransitionFinished)[0].outcome == "done"
    assert Plan.of_units(watched.job.adapter.units()) == watched.controller.plan
    assert watched.job.adapter.plan_linked == watched.controller.plan
    assert {"nereus_decided", "nereus_primitive_finished", "nereus_transition_finished"} <= set(
        watched.told
    )


def test_steady_lengths_wake_nobody_and_nothing_flaps():
    job = big_job()
    watched = Watched(job, good_plan(job, 1500))
    watched.run(1500)
    quiet = watched.run(*[1500, 1560, 1440] * 4)
    # The plan is looked at once more when it has been seen running.
    assert [(d.trigger, d.path) for d in quiet if d] in ([], [("recheck", "none")])
    assert not watched.of(TransitionStarted)


def test_a_controller_that_decides_every_step_answers_by_bounds_alone():
    job = big_job()
    every = {"policy": {"tokens_change": 1e-6, "max_horizon_steps": 2, "delta": 0.05}}
    watched = Watched(job, good_plan(job, 1500), config=every)
    watched.run(*[1500] * 4)
    found = watched.run(*[1500 + 7 * (n % 5) + n for n in range(1, 13)])
    assert all(d is not None and d.trigger == "tokens" for d in found)
    assert sum("by bounds alone" in d.rule for d in found) >= 6, [d.rule for d in found]
    assert not watched.of(TransitionStarted)
    told = next(d for d in found if "by bounds alone" in d.rule).explain()
    assert "within 5% of the best possible" in told
    assert "cannot go on" not in told
    # What has moved out of reach is searched again, and watched again from there.
    far = watched.run(4000, 4010, 4020, 4030, 4040, 4050)
    assert "by bounds alone" not in far[0].rule


def test_predictions_meet_the_measured_steps():
    job = big_job()
    watched = Watched(job, good_plan(job, 1500), factor=1.7)
    watched.run(*[1500] * 12)
    last = watched.of(StepObserved)[-1]
    assert last.predicted_s == pytest.approx(last.step_s, rel=0.1)
    assert watched.controller.predicted_s == pytest.approx(last.step_s, rel=0.1)


def test_longer_responses_wake_the_planner():
    job = big_job()
    watched = Watched(job, good_plan(job, 500))
    watched.run(500, 510)
    (decision,) = watched.run(900)
    assert decision.trigger == "tokens"
    assert watched.of(Decided)[-1].trigger == "tokens"
    assert watched.run(905) == [None]


@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_without_adapt_nothing_is_touched(mode):
    job = big_job()
    plan = packed(job, generate=(8, 1), train=(2, 4), ref=(8, 1))
    watched = Watched(job, plan, config={"mode": mode})
    decisions = watched.run(*[1500] * 4)
    assert watched.controller.plan == plan
    assert not watched.job.adapter.log
    assert len(watched.of(StepObserved)) == 4
    assert any(decisions) == (mode == "advise")
    assert bool(watched.of(Decided)) == (mode == "advise")


def run_over_a_device_that_comes_back_at_once(tokens):
    job = big_job()
    watched = Watched(job, good_plan(job, tokens), config={"policy": {"cooldown_steps": 3}})
    watched.run(tokens, tokens)
    watched.job.drain(job.cluster.devices[3])
    watched.run(tokens)
    watched.job.give_back(job.cluster.devices[3])
    return watched.run(*[tokens] * 4)


def test_what_falls_into_the_cooldown_is_decided_when_that_is_over():
    first, *rest = run_over_a_device_that_comes_back_at_once(tokens=100)
    assert (first.trigger, first.admitted) == ("devices", False)
    assert [d.trigger if d else None for d in rest][:2] == [None, "recheck"]
    assert rest[1].admitted


def test_a_change_that_is_cheaper_than_to_wait_for_the_cooldown_goes_ahead():
    first, *_ = run_over_a_device_that_comes_back_at_once(tokens=1500)
    assert (first.trigger, first.admitted) == ("devices", True)


def test_a_veto_holds_an_opportunistic_transition_and_its_reason_is_on_record():
    job = big_job()
    plan = packed(job, generate=(8, 1), train=(2, 4), ref=(8, 1))
    watched = Watched(job, plan, veto=lambda decision: "frozen for an audit")
    watched.run(1500)
    (decided,) = watched.of(Decided)
    assert not decided.admitted
    assert "frozen for an audit" in decided.rule
    assert watched.controller.plan == plan


def test_a_failed_opportunistic_transition_leaves_the_old_plan_running():
    job = big_job()
    plan = packed(job, generate=(8, 1), train=(2, 4), ref=(8, 1))
    watched = Watched(job, plan)

    def refuse(op, phase):
        if phase == "prepare" and len(watched.of(PrimitiveFinished)) == 1:
            raise Infeasible(f"{op}: no memory", op)

    watched.job.adapter.fault = refuse
    watched.run(1500)
    assert [e.outcome for e in watched.of(TransitionFinished)] == ["done", "rolled_back"]
    same = {s: (p.layout, set(p.units)) for s, p in watched.controller.plan.items()}
    assert same == {s: (p.layout, set(p.units)) for s, p in plan.items()}
    assert watched.job.adapter.plan_linked == watched.controller.plan
    watched.run(1500)


def test_state_that_changed_in_a_transition_stops_the_job():
    job = tiny_job(4)
    plan = packed(job, generate=(1, 1), train=(4, 1), ref=(1, 1))
    watched = Watched(job, plan, with_state=True)
    adapter = watched.job.adapter
    truth = adapter._commit

    def spoil(op, atlas):
        receipt = truth(op, atlas)
        for unit in receipt.created:
            next(iter(adapter.state[unit.id, 0].values()))[...] = 5
        return receipt

    adapter._commit = spoil
    watched.job.drain(job.cluster.devices[3])
    with pytest.raises(TransitionFailed, match="verification failed"):
        watched.run(20)


def test_the_run_is_framed_by_its_first_and_last_event():
    job = tiny_job(4)
    watched = Watched(job, packed(job, generate=(1, 1), train=(1, 1), ref=(1, 1)))
    watched.run(10)
    watched.controller.finished("done")
    assert isinstance(watched.events[0], RunStarted)
    assert watched.of(RunFinished) == [RunFinished(1, "done", 0.0, 0.0)]


@pytest.mark.parametrize(("tokens", "path"), [(16000, "urgent"), (64000, "none")])
def test_responses_that_no_longer_fit_are_urgent_where_another_plan_holds_them(tokens, path):
    job = replace(big_job(), max_response_tokens=65536)
    watched = Watched(job, packed(job, generate=(1, 1), train=(2, 1), ref=(1, 1)))
    before, long = watched.controller.plan, Lengths(512, tokens, tokens, tokens)
    assert CostModel(job).memory_problem(before, long)
    (decision,) = watched.run(tokens)
    assert (decision.path, decision.trigger) == (path, "memory")
    if path == "urgent":
        assert CostModel(job).memory_problem(watched.controller.plan, long) is None
    else:
        assert "no plan fits" in decision.rule
        assert watched.controller.plan == before


def test_a_batch_that_would_not_fit_changes_the_plan_before_it_is_trained_on():
    job = replace(big_job(), max_response_tokens=65536)
    watched = Watched(job, packed(job, generate=(1, 1), train=(2, 1), ref=(1, 1)))
    watched.run(1000)
    before, num_seen = watched.controller.plan, len(watched.of(StepObserved))
    prompt, fits, long = (TokenStats.of([n] * 64) for n in (512, 1000, 16000))
    assert watched.controller.before_training(prompt, fits) is None
    decision = watched.controller.before_training(prompt, long)
    assert (decision.path, decision.trigger, decision.admitted) == ("urgent", "memory", True)
    assert "the batch just sampled" in decision.event().signal
    after = watched.controller.plan
    assert after != before
    assert watched.job.adapter.plan_linked == after
    lengths = Lengths(512, 16000, 16000, 16000)
    assert CostModel(job).memory_problem(before, lengths)
    assert CostModel(job).memory_problem(after, lengths) is None
    assert len(watched.of(StepObserved)) == num_seen  # no step was completed meanwhile


def test_a_batch_that_would_not_fit_changes_nothing_in_a_mode_that_may_not():
    job = replace(big_job(), max_response_tokens=65536)
    long = TokenStats.of([16000] * 64)
    for mode, decides in (("observe", False), ("advise", True)):
        plan = packed(job, generate=(1, 1), train=(2, 1), ref=(1, 1))
        watched = Watched(job, plan, config={"mode": mode})
        watched.run(1000)
        decision = watched.controller.before_training(TokenStats.of([512] * 64), long)
        assert (decision is not None) is decides
        assert watched.controller.plan == plan


def test_a_switch_that_the_adapter_takes_back_leaves_the_old_plan_and_is_no_epoch():
    job = big_job()
    watched = Watched(job, packed(job, generate=(8, 1), train=(2, 4), ref=(8, 1)))
    adapter = watched.job.adapter
    before, units, relink = watched.controller.plan, adapter.units(), adapter.relink

    def taken_back(plan):
        adapter.relink = relink
        adapter._units = units
        raise TransitionFailed("the switch", RuntimeError("nobody met"), rolled_back=True)

    adapter.relink = taken_back
    watched.run(*[1500] * 2)
    first, *_ = watched.of(TransitionFinished)
    assert (first.outcome, first.epoch) == ("rolled_back", None)
    assert "nobody met" in first.error
    assert Plan.from_json(first.plan) == before
    watched.run(*[1500] * 8)
    done = [e for e in watched.of(TransitionFinished) if e.outcome == "done"]
    assert watched.controller.epoch == len(done)


def busy_boundary(watched):
    def boundary(stages, *, timeout_s):
        raise BoundaryTimeout(ACTOR_TRAIN, timeout_s)

    watched.job.adapter.boundary = boundary


def test_a_boundary_that_does_not_come_is_on_record_and_the_job_goes_on():
    job = big_job()
    plan = packed(job, generate=(8, 1), train=(2, 4), ref=(8, 1))
    watched = Watched(job, plan)
    busy_boundary(watched)
    watched.run(1500, 1500)
    (finished,) = watched.of(TransitionFinished)
    assert finished.outcome == "failed"
    assert "actor/train was still running after 600 s" in finished.error
    assert watched.controller.plan == plan


def test_an_urgent_transition_without_a_boundary_is_an_error():
    job = big_job()
    watched = Watched(job, good_plan(job, 1500))
    busy_boundary(watched)
    watched.job.drain(job.cluster.devices[0])
    with pytest.raises(BoundaryTimeout):
        watched.run(1500)


def test_units_that_the_configuration_demands_are_not_weighed_against_seconds():
    job = big_job()
    plan = packed(job, generate=(8, 1), train=(8, 1), ref=(8, 1))
    watched = Watched(job, plan, config={"constraints": {"min_dp": {"actor/train": 2}}})
    (decision,) = [d for d in watched.run(256) if d]
    assert (decision.path, decision.admitted) == ("urgent", True)
    assert decision.rule.startswith("1 of the units that constraints.min_dp asks for are missing")
    assert watched.controller.plan[ACTOR_TRAIN].dp >= 2
