"""Admission: is the transition worth it, and which rule says so?"""

from __future__ import annotations

from dataclasses import dataclass

from nereus_core.config import PolicyConfig
from nereus_core.cost import Interval
from nereus_core.events import Decided
from nereus_core.forecast import Crossing
from nereus_core.plan import Plan
from nereus_core.planner import Candidate, Planned, RunnerUp


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision with all that led to it."""

    step: int
    trigger: str
    path: str
    """``urgent``, ``opportunistic`` or ``none``."""
    admitted: bool
    rule: str
    current_plan: Plan
    candidate_plan: Plan | None
    current_s: Interval | None
    """None when the current plan cannot run."""
    candidate_s: Interval | None
    saving_s: Interval | None
    transition_s: Interval | None
    horizon_steps: float | None
    decision_s: float
    runner_ups: tuple[RunnerUp, ...] = ()

    def event(self) -> Decided:
        """Return the record of this decision."""
        return Decided(
            step=self.step,
            trigger=self.trigger,
            path=self.path,
            admitted=self.admitted,
            rule=self.rule,
            current_plan=self.current_plan.to_json(),
            candidate_plan=None if self.candidate_plan is None else self.candidate_plan.to_json(),
            current_s=None if self.current_s is None else self.current_s.mean_s,
            candidate_s=None if self.candidate_s is None else self.candidate_s.mean_s,
            saving_s=None if self.saving_s is None else self.saving_s.mean_s,
            transition_s=None if self.transition_s is None else self.transition_s.mean_s,
            horizon_steps=self.horizon_steps,
            decision_s=self.decision_s,
            runner_ups=tuple(
                {"plan": r.plan.to_json(), "predicted_s": r.predicted_s, "reason": r.reason}
                for r in self.runner_ups
            ),
        )

    def explain(self) -> str:
        """Return the decision in a few lines, from its record alone."""
        return explain_event(self.event())


def explain_event(decided: Decided) -> str:
    """Return a recorded decision in a few lines."""
    verdict = "admitted" if decided.admitted else "not admitted"
    lines = [f"step {decided.step}: {decided.trigger} -> {decided.path}, {verdict}"]
    now = "cannot run" if decided.current_s is None else f"{decided.current_s:.3g} s/step"
    lines.append(f"  now    {Plan.from_json(decided.current_plan)}  ({now})")
    if decided.candidate_plan is not None:
        then = "?" if decided.candidate_s is None else f"{decided.candidate_s:.3g} s/step"
        lines.append(f"  best   {Plan.from_json(decided.candidate_plan)}  ({then})")
    lines += [
        f"  lost   {Plan.from_json(r['plan'])}  ({r['predicted_s']:.3g} s/step, {r['reason']})"
        for r in decided.runner_ups[:3]
    ]
    lines.append(f"  rule   {decided.rule}")
    return "\n".join(lines)


def admit(
    *,
    step: int,
    trigger: str,
    current: Candidate | None,
    current_plan: Plan,
    candidate: Planned,
    transition: Interval,
    saving: Interval,
    crossing: Crossing,
    policy: PolicyConfig,
    steps_since_transition: int | None,
    decision_s: float,
) -> Decision:
    """Decide on a candidate.

    Urgent, when the current plan cannot run: admitted whatever it costs. Otherwise the lower bound
    of the saving, over the lower bound of steps until the trigger crosses again, must reach the
    upper bound of the transition's cost; small savings and recent transitions are refused first.

    Args:
        step: RL steps completed.
        trigger: what woke the controller.
        current: the running plan with its prediction; None when it is infeasible.
        current_plan: the running plan.
        candidate: what the planner answered.
        transition: predicted seconds of the whole transition.
        saving: seconds per step, as `CostModel.saving` gives them.
        crossing: when the trigger is expected to cross again.
        policy: thresholds.
        steps_since_transition: None before the first transition.
        decision_s: seconds spent on deciding so far, for the record.
    """
    path = "urgent" if current is None else "opportunistic"
    admitted, rule = (
        (True, "urgent: the current plan cannot run, so profit is not asked for")
        if current is None
        else _payback(
            current, current_plan, candidate, transition, saving, crossing, policy,
            steps_since_transition,
        )
    )  # fmt: skip
    return Decision(
        step=step,
        trigger=trigger,
        path=path,
        admitted=admitted,
        rule=rule,
        current_plan=current_plan,
        candidate_plan=candidate.best.plan,
        current_s=None if current is None else current.step.step,
        candidate_s=candidate.best.step.step,
        saving_s=None if current is None else saving,
        transition_s=transition,
        horizon_steps=crossing.low_steps,
        decision_s=decision_s,
        runner_ups=candidate.runner_ups,
    )


def _payback(
    current: Candidate,
    current_plan: Plan,
    candidate: Planned,
    transition: Interval,
    saving: Interval,
    crossing: Crossing,
    policy: PolicyConfig,
    steps_since_transition: int | None,
) -> tuple[bool, str]:
    if candidate.best.plan == current_plan:
        return False, "the current plan is the best one"
    since = steps_since_transition
    if since is not None and since < policy.cooldown_steps:
        return False, f"{since} steps since the last transition, {policy.cooldown_steps} required"
    now_s = current.step.step.mean_s
    if saving.mean_s < policy.min_saving * now_s:
        return False, (
            f"saving {saving.mean_s:.3g} s/step is under {policy.min_saving:.0%} of {now_s:.3g} s"
        )
    gain_s = saving.low_s * crossing.low_steps
    sums = (
        f"saving >= {saving.low_s:.3g} s/step x {crossing.low_steps:.0f} steps "
        f"(next crossing: {crossing.signal}) = {gain_s:.3g} s"
    )
    if gain_s < transition.high_s:
        return False, f"{sums} does not repay a transition of <= {transition.high_s:.3g} s"
    return True, f"{sums} repays a transition of <= {transition.high_s:.3g} s"
