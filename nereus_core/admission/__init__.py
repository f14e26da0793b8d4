"""Admission: is a transition worth it, and the record from which that can be explained.

Urgent: the current plan cannot go on (a device is lost or leaving, memory no longer suffices);
profitability is not asked. Opportunistic: the policy's rule decides (`policies`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nereus_core.admission.explain import explain_event
from nereus_core.admission.policies import POLICIES, Offer, Policy, Rule, Verdict
from nereus_core.config import PolicyConfig
from nereus_core.cost import Interval
from nereus_core.events import Decided
from nereus_core.forecast import Crossing
from nereus_core.plan import Plan
from nereus_core.planner import Candidate, Planned, RunnerUp

__all__ = [
    "POLICIES",
    "Decision",
    "History",
    "Offer",
    "Policy",
    "Rule",
    "Verdict",
    "admit",
    "explain_event",
]

Path = Literal["urgent", "opportunistic", "none"]


@dataclass(frozen=True, slots=True)
class History:
    """What a job has been through, as far as admission asks."""

    steps_since_transition: int | None = None
    """None when there was none yet."""
    transitions: int = 0
    elapsed_s: float = 0.0
    """Seconds of steps and transitions so far."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to go over to a candidate plan, with everything that was compared."""

    step: int
    trigger: str
    """What woke the controller: ``tokens``, ``devices``, ``memory``, ``efficiency`` ..."""
    path: Path
    admitted: bool
    rule: str
    """The rule that fired, in words with values."""
    current_plan: Plan
    candidate_plan: Plan | None
    current_s: Interval | None
    """Predicted step latency; None when the current plan cannot go on, or bounds were enough."""
    candidate_s: Interval | None
    saving_s: Interval | None
    """Per step."""
    transition_s: Interval | None
    crossing: Crossing | None
    """Steps over which the saving is counted."""
    decision_s: float
    signal: str = ""
    """The values that woke the controller, in words."""
    policy: str = "payback"
    """Which rule judges opportunistic transitions."""
    runner_ups: tuple[tuple[RunnerUp, Interval], ...] = ()
    """Plans that lost, with their predicted seconds."""

    def event(self) -> Decided:
        """Return the record that is written; it explains itself."""
        bounds = {
            "current": self.current_s,
            "candidate": self.candidate_s,
            "saving": self.saving_s,
            "transition": self.transition_s,
        }
        crossing = self.crossing
        return Decided(
            step=self.step,
            trigger=self.trigger,
            path=self.path,
            admitted=self.admitted,
            rule=self.rule,
            current_plan=self.current_plan.to_json(),
            candidate_plan=None if self.candidate_plan is None else self.candidate_plan.to_json(),
            current_s=_mean(self.current_s),
            candidate_s=_mean(self.candidate_s),
            saving_s=_mean(self.saving_s),
            transition_s=_mean(self.transition_s),
            horizon_steps=None if crossing is None else crossing.steps,
            decision_s=self.decision_s,
            runner_ups=tuple(
                {
                    "plan": r.plan.to_json(),
                    "predicted_s": r.predicted_s,
                    "bounds_s": [bound.low_s, bound.high_s],
                    "reason": r.reason,
                }
                for r, bound in self.runner_ups
            ),
            bounds_s={k: [i.low_s, i.high_s] for k, i in bounds.items() if i is not None},
            signal=self.signal,
            policy=self.policy,
            horizon_bounds=() if crossing is None else (crossing.low_steps, crossing.high_steps),
            horizon_signal="" if crossing is None else crossing.signal,
        )

    def explain(self) -> str:
        """Say in a few lines what was decided and why."""
        return explain_event(self.event())


def _mean(interval: Interval | None) -> float | None:
    return None if interval is None else interval.mean_s


def admit(
    *,
    step: int,
    trigger: str,
    current: Candidate | None,
    current_plan: Plan,
    candidate: Planned,
    transition: Interval,
    crossing: Crossing,
    policy: PolicyConfig,
    history: History,
    decision_s: float,
    saving: Interval | None = None,
    why: str | None = None,
    signal: str = "",
    runner_ups: tuple[tuple[RunnerUp, Interval], ...] = (),
) -> Decision:
    """Decide.

    Args:
        step: RL steps completed.
        trigger: what woke the controller.
        current: the current plan and its cost; None when it cannot go on: it does not fit, or uses
            a device that is lost, draining or excluded.
        current_plan: the plan that runs (in part, where devices are lost).
        candidate: the planner's result.
        transition: predicted seconds of going over to it.
        crossing: when the plan will be thought about again.
        policy: which rule, and its thresholds.
        history: what the job has been through.
        decision_s: seconds spent on thinking so far.
        saving: `CostModel.saving` of the two plans, in which shared uncertainty cancels; without
            it, the bounds of both steps are taken as independent.
        why: what is wrong with the current plan, where ``current`` is None.
        signal: the values that woke the controller, in words.
        runner_ups: plans that lost, with their predicted seconds.
    """
    chosen = candidate.best
    path: Path
    if current is None:
        saving = None
        why = why or "the current plan cannot go on"
        path, verdict = "urgent", Verdict(True, f"{why}: profit is not asked")
    else:
        saving = saving or _independent(current.step.step, chosen.step.step)
        offer = Offer(
            current.step.step,
            chosen.step.step,
            saving,
            transition,
            crossing,
            history.steps_since_transition,
            history.transitions,
            history.elapsed_s,
        )
        path, verdict = "opportunistic", _judge(chosen.plan == current_plan, offer, policy)
    return Decision(
        step=step,
        trigger=trigger,
        path=path,
        admitted=verdict.admitted,
        rule="; ".join([verdict.rule, *candidate.relaxed]),
        current_plan=current_plan,
        candidate_plan=chosen.plan,
        current_s=None if current is None else current.step.step,
        candidate_s=chosen.step.step,
        saving_s=saving,
        transition_s=transition,
        crossing=crossing,
        decision_s=decision_s,
        signal=signal,
        policy=policy.admission,
        runner_ups=runner_ups,
    )


def _judge(same: bool, offer: Offer, policy: PolicyConfig) -> Verdict:
    rule = POLICIES[policy.admission].rule
    if same:
        return Verdict(False, "the current plan is the best one")
    if rule is None:
        return Verdict(False, f"the policy {policy.admission!r} changes no plan that can go on")
    return rule(offer, policy)


def _independent(before: Interval, after: Interval) -> Interval:
    mean_s = before.mean_s - after.mean_s
    below = math.hypot(before.mean_s - before.low_s, after.high_s - after.mean_s)
    above = math.hypot(before.high_s - before.mean_s, after.mean_s - after.low_s)
    return Interval(mean_s, mean_s - below, mean_s + above)
