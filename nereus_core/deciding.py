"""Decide: is the plan still good, what is better, and is going there worth it?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from nereus_core.admission import POLICIES, Decision, admit
from nereus_core.config import PolicyConfig
from nereus_core.cost import CostModel, Interval, Lengths
from nereus_core.errors import NoFeasiblePlan
from nereus_core.knowledge import Knowledge
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.planner import Candidate, Constraints, Planned, Watch, best, still_good
from nereus_core.situation import Situation
from nereus_core.transition import TransitionGraph
from nereus_core.triggers import Wake
from nereus_core.workload import ModelStage

_NOTHING_SAVED = Interval(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision, the graph that carries it out (None where none was sought), and its price."""

    decision: Decision
    graph: TransitionGraph | None
    cost: CostModel
    """What the decision was made with."""
    watch: Watch | None = None
    """Of the plan that stays, to answer without a search next time; None where it is not known to
    be good."""


def decide(
    wake: Wake,
    now: Situation,
    known: Knowledge,
    constraints: Constraints,
    policy: PolicyConfig,
    compiled: Callable[[Plan], TransitionGraph],
    begin_s: float,
) -> Decided:
    """Decide on what to do about a trigger. Touches nothing.

    Args:
        wake: What woke the controller.
        now: What runs.
        known: What was learned.
        constraints: What no plan may do.
        policy: Which rule of admission, and its thresholds.
        compiled: Compiles the transition to a plan.
        begin_s: When deciding began, on time.perf_counter.

    Raises:
        NoFeasiblePlan: the job cannot go on as it is, and nothing fits.
        StateLost: the same, because state is gone.
    """
    cost, lengths = known.cost.on(now.job), known.lengths
    watched = known.watch and known.watch.bounds(cost, lengths, constraints, now.plan)
    if watched and not now.urgent and watched.within(policy.delta):
        why = (
            f"the current plan is within {100 * policy.delta:.3g}% of the best possible, by bounds "
            f"alone: a step takes at most {watched.most_s:.4g} s, under any plan at least "
            f"{watched.least_s:.4g} s"
        )
        same = _unchanged(wake, now, known, None, policy, why, begin_s)
        return Decided(same, None, cost, known.watch)
    current = None if now.urgent else Candidate(now.plan, cost.step(now.plan, lengths))
    rule = POLICIES[policy.admission]

    def stay(why: str, *, good: bool = False) -> Decided:
        decision = _unchanged(wake, now, known, current, policy, why, begin_s)
        watch = _watch(cost, known, constraints, now.plan, policy.delta) if good else known.watch
        return Decided(decision, None, cost, watch)

    if current and rule.rule is None:
        return stay(f"the policy {rule.name!r} changes no plan that can go on")
    narrow = kept(constraints, now.plan) if rule.layouts == "kept" else constraints
    if current and still_good(cost, lengths, narrow, now.plan, policy.delta):
        why = f"the current plan is within {100 * policy.delta:.3g}% of the best possible"
        return stay(why, good=narrow is constraints)
    try:
        planned = _best(cost, lengths, narrow, constraints, now)
    except NoFeasiblePlan as error:
        if now.problem:
            raise
        return stay(str(error))
    target = planned.best.plan
    problem = now.problem or now.memory_problem
    missing = constraints.missing_units(now.plan)
    if current and constraints.missing_units(target) < missing:
        # What the configuration demands is not weighed against seconds.
        current = None
        problem = f"{missing} of the units that constraints.min_dp asks for are missing"
    graph = compiled(target)
    decision = admit(
        step=known.step,
        trigger=wake.trigger,
        signal=wake.why,
        current=current,
        current_plan=now.plan,
        candidate=planned,
        transition=graph.predicted(cost),
        saving=cost.saving(now.plan, target, lengths) if current else _NOTHING_SAVED,
        crossing=known.crossing(now.job),
        policy=policy,
        history=known.history,
        decision_s=time.perf_counter() - begin_s,
        why=problem,
        runner_ups=tuple((r, cost.step(r.plan, lengths).step) for r in planned.runner_ups),
    )
    return Decided(decision, graph, cost)


def _watch(
    cost: CostModel, known: Knowledge, constraints: Constraints, plan: Plan, delta: float
) -> Watch | None:
    """A watch of a plan that is good; the old one where a new one would tell no more."""
    old = known.watch
    still = old and old.bounds(cost, known.lengths, constraints, plan)
    if old and still and not old.middle.within(delta):
        return old
    return Watch.of(cost, known.lengths, constraints, plan)


def kept(constraints: Constraints, plan: Plan) -> Constraints:
    """Return constraints under which only the number of units of a plan may change.

    Layouts are pinned, and stages that share devices go on sharing them.
    """
    pinned: Mapping[ModelStage, Layout] = {s: p.layout for s, p in plan.items()}
    together = {
        frozenset(other for other in plan if other == stage or plan.sharing(stage, other))
        for stage in plan
    }
    groups = tuple(sorted((g for g in together if len(g) > 1), key=sorted))
    return replace(
        constraints,
        pinned=MappingProxyType({**pinned, **constraints.pinned}),
        colocate=(*constraints.colocate, *groups),
    )


def _best(
    cost: CostModel, lengths: Lengths, narrow: Constraints, wide: Constraints, now: Situation
) -> Planned:
    """The best plan that the policy considers; where there is none and there must be, any."""
    try:
        return best(cost, lengths, narrow, now.plan)
    except NoFeasiblePlan:
        if not now.urgent or narrow is wide:
            raise
    return best(cost, lengths, wide, now.plan)


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
        crossing=None,
        decision_s=0.0,
    )
    return Decided(decision, graph, known.cost.on(now.job))


def _unchanged(
    wake: Wake,
    now: Situation,
    known: Knowledge,
    current: Candidate | None,
    policy: PolicyConfig,
    rule: str,
    begin_s: float,
) -> Decision:
    return Decision(
        step=known.step,
        trigger=wake.trigger,
        signal=wake.why,
        path="none",
        admitted=False,
        rule=rule,
        policy=policy.admission,
        current_plan=now.plan,
        candidate_plan=None,
        current_s=current.step.step if current else None,
        candidate_s=None,
        saving_s=None,
        transition_s=None,
        crossing=None,
        decision_s=time.perf_counter() - begin_s,
    )
