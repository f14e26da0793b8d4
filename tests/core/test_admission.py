import json
from dataclasses import replace

import pytest

from nereus_core.admission import admit, explain_event
from nereus_core.cluster import Cluster
from nereus_core.config import PolicyConfig
from nereus_core.cost import CostModel, Interval, Lengths
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.events import Decided, from_json, to_json
from nereus_core.forecast import Crossing
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.planner import Candidate, Constraints, best
from nereus_core.sim.models import TINY
from nereus_core.workload import ACTOR_TRAIN, Job, grpo

CLUSTER = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
JOB = Job(grpo(), {"actor": TINY, "ref": TINY}, CLUSTER, 32, 64, 256)
LENGTHS = Lengths(32, 128, 192, 256)
COST = CostModel(JOB)
SLOW = Plan(dict.fromkeys(JOB.workload.stages, Placement.packed(Layout(4, 1), CLUSTER.devices)))
PLANNED = best(COST, LENGTHS, Constraints(), SLOW)
SAVING = COST.saving(SLOW, PLANNED.best.plan, LENGTHS)


def decide(**changes):
    values = {
        "step": 12,
        "trigger": "tokens",
        "current": Candidate(SLOW, COST.step(SLOW, LENGTHS)),
        "current_plan": SLOW,
        "candidate": PLANNED,
        "transition": Interval(0.4, 0.3, 0.5),
        "crossing": Crossing(50, "tokens"),
        "policy": PolicyConfig(),
        "steps_since_transition": None,
        "decision_s": 0.012,
        "saving": SAVING,
    }
    return admit(**{**values, **changes})


def test_a_saving_that_repays_is_admitted():
    decision = decide()
    assert decision.admitted
    assert decision.path == "opportunistic"
    assert decision.rule.startswith("payback: at least ")
    assert "repays a transition of up to 0.5 s" in decision.rule


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_payback_compares_lower_bounds_with_the_upper_bound(factor):
    saved_s = SAVING.low_s * 50
    cost_s = Interval(saved_s / 2, saved_s / 4, saved_s / factor)
    assert decide(transition=cost_s).admitted is (factor > 1)


def test_an_infeasible_plan_is_left_whatever_it_costs():
    decision = decide(current=None, transition=Interval(1e5, 1e4, 1e6), steps_since_transition=0)
    assert decision.admitted
    assert decision.path == "urgent"
    assert decision.current_s is None
    assert decision.saving_s is None
    assert "cannot go on" in decision.explain()


def test_cooldown_holds_back_opportunistic_transitions():
    assert not decide(steps_since_transition=1).admitted
    assert "cooldown: 1 steps" in decide(steps_since_transition=1).rule
    assert decide(steps_since_transition=2).admitted


def test_a_small_saving_is_not_worth_a_change_even_for_free():
    policy = PolicyConfig(min_saving=0.99)
    decision = decide(policy=policy, transition=Interval(0, 0, 0))
    assert not decision.admitted
    assert decision.rule.startswith("hysteresis")


def test_the_best_plan_is_kept():
    chosen = PLANNED.best
    decision = decide(current=chosen, current_plan=chosen.plan)
    assert not decision.admitted
    assert decision.rule == "the current plan is the best one"


def test_a_saving_that_may_be_a_loss_is_not_admitted_over_any_horizon():
    uncertain = Interval(SAVING.mean_s, -0.01, 2 * SAVING.mean_s)
    decision = decide(
        saving=uncertain, transition=Interval(0, 0, 0), crossing=Crossing(1e6, "none")
    )
    assert not decision.admitted


def test_without_a_shared_saving_both_bounds_count():
    fast = PLANNED.best.plan
    half = Placement.packed(Layout(1, 1), CLUSTER.devices[:2])
    alike = Plan({**fast, ACTOR_TRAIN: half})  # differs in one stage, shares all else
    current = {"current": Candidate(alike, COST.step(alike, LENGTHS)), "current_plan": alike}
    shared = decide(**current, saving=COST.saving(alike, fast, LENGTHS)).saving_s
    loose = decide(**current, saving=None).saving_s
    assert loose.mean_s == pytest.approx(shared.mean_s)
    assert loose.low_s < shared.low_s


@pytest.mark.parametrize("changes", [{}, {"current": None}, {"steps_since_transition": 0}])
def test_a_decision_is_explained_from_its_written_record_alone(changes):
    decision = decide(**changes)
    record = json.loads(json.dumps(to_json(decision.event(), 1.0)))
    event, _ = from_json(record)
    assert isinstance(event, Decided)
    assert explain_event(event) == decision.explain()


def test_the_explanation_holds_trigger_plans_bounds_payback_rule_and_losers():
    decision = decide()
    text = decision.explain()
    first, *rest = text.splitlines()
    assert first == "step 12: opportunistic decision, admitted (woken by tokens; thought for 12 ms)"
    assert str(SLOW) in rest[0]
    assert str(PLANNED.best.plan) in rest[1]
    assert f"{SAVING.low_s:.3g} s x 50 steps = {SAVING.low_s * 50:.3g} s" in text
    assert f"rule       {decision.rule}" in text
    assert all(r.reason in text for r in PLANNED.runner_ups)
    assert PLANNED.runner_ups


def test_a_record_without_bounds_is_explained_too():
    event = replace(decide().event(), bounds_s={}, runner_ups=())
    assert "payback" in explain_event(event)
