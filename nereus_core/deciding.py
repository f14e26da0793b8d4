"""Decide: is the plan still good, what is better, and is going there worth it?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from nereus_core.admission import Decision, admit
from nereus_core.config import PolicyConfig
from nereus_core.cost import CostModel, Interval
from nereus_core.errors import NoFeasiblePlan
from nereus_core.knowledge import Knowledge
from nereus_core.plan import Plan
from nereus_core.planner import Candidate, Constraints, best, still_good
from nereus_core.situation import Situation
from nereus_core.transition import TransitionGraph
from nereus_core.triggers import Trigger

_NOTHING_SAVED = Interval(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision, the graph that carries it out (None where none was sought), and its price."""

    decision: Decision
    graph: TransitionGraph | None
    cost: CostModel
    """What the decision was made with."""


def decide(
    trigger: Trigger,
    now: Situation,
    known: Knowledge,
    constraints: Constraints,
    policy: PolicyConfig,
    compiled: Callable[[Plan], TransitionGraph],
    begin_s: float,
) -> Decided:
    """Decide on what to do about a trigger. Touches nothing.

    Args:
        trigger: What woke the controller.
        now: What runs.
        known: What was learned.
        constraints: What no plan may do.
        policy: Thresholds of admission.
        compiled: Compiles the transition to a plan.
        begin_s: When deciding began, on time.perf_counter.

    Raises:
        NoFeasiblePlan: the job cannot go on as it is, and nothing fits.
        StateLost: the same, because state is gone.
    """
    cost, lengths = known.cost.on(now.job), known.lengths
    current = None if now.urgent else Candidate(now.plan, cost.step(now.plan, lengths))

    def stay(rule: str) -> Decided:
        return Decided(_unchanged(trigger, now, known, current, rule, begin_s), None, cost)

    if current and still_good(cost, lengths, constraints, now.plan, policy.delta):
        return stay(f"the current plan is within {policy.delta:.0%} of the best possible")
    try:
        planned = best(cost, lengths, constraints, now.plan)
    except NoFeasiblePlan as error:
        if now.problem:
            raise
        return stay(str(error))
    target = planned.best.plan
    why = now.problem or now.memory_problem
    missing = constraints.missing_units(now.plan)
    if current and constraints.missing_units(target) < missing:
        # What the configuration demands is not weighed against seconds.
        current, why = None, f"{missing} of the units that constraints.min_dp asks for are missing"
    graph = compiled(target)
    decision = admit(
        step=known.step,
        trigger=trigger,
        current=current,
        current_plan=now.plan,
        candidate=planned,
        transition=graph.predicted(cost),
        saving=cost.saving(now.plan, target, lengths) if current else _NOTHING_SAVED,
        crossing=known.forecast.steps_to_crossing(policy.tokens_change, policy.max_horizon_steps),
        policy=policy,
        steps_since_transition=known.steps_since_transition,
        decision_s=time.perf_counter() - begin_s,
        why=why,
    )
    return Decided(decision, graph, cost)


def asked_for(
    plan: Plan, why: str, now: Situation, known: Knowledge, graph: TransitionGraph
) -> Decided:
    """Wrap what somebody else has decided."""
    decision = Decision(
        step=known.step,
        trigger="none",
        path="opportunistic",
        admitted=True,
        rule=why,
        current_plan=now.plan,
        candidate_plan=plan,
        current_s=None,
        candidate_s=None,
        saving_s=None,
        transition_s=None,
        horizon_steps=None,
        decision_s=0.0,
    )
    return Decided(decision, graph, known.cost.on(now.job))


def _unchanged(
    trigger: Trigger,
    now: Situation,
    known: Knowledge,
    current: Candidate | None,
    rule: str,
    begin_s: float,
) -> Decision:
    return Decision(
        step=known.step,
        trigger=trigger,
        path="none",
        admitted=False,
        rule=rule,
        current_plan=now.plan,
        candidate_plan=None,
        current_s=current.step.step if current else None,
        candidate_s=None,
        saving_s=None,
        transition_s=None,
        horizon_steps=None,
        decision_s=time.perf_counter() - begin_s,
    )
