"""Admission: is a transition worth it, and the record from which that can be explained.

Urgent: the current plan cannot go on (a device is lost or leaving, memory no longer suffices);
profitability is not asked. Opportunistic: the lower bound of the saving per step, over the expected
steps until the plan is thought about again, must repay the upper bound of the transition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nereus_core.config import PolicyConfig
from nereus_core.cost import Interval
from nereus_core.events import Decided, Json
from nereus_core.forecast import Crossing
from nereus_core.plan import Plan
from nereus_core.planner import Candidate, Planned, RunnerUp

Path = Literal["urgent", "opportunistic", "none"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to go over to a candidate plan, with everything that was compared."""

    step: int
    trigger: str
    """What woke the controller: ``tokens``, ``devices``, ``memory``, ``efficiency``, ``none``."""
    path: Path
    admitted: bool
    rule: str
    """The rule that fired, in words with values."""
    current_plan: Plan
    candidate_plan: Plan | None
    current_s: Interval | None
    """Predicted step latency; None when the current plan cannot go on."""
    candidate_s: Interval | None
    saving_s: Interval | None
    """Per step."""
    transition_s: Interval | None
    horizon_steps: float | None
    """Expected steps over which the saving is counted."""
    decision_s: float
    runner_ups: tuple[RunnerUp, ...] = ()

    def event(self) -> Decided:
        """Return the record that is written; it explains itself."""
        bounds = {
            "current": self.current_s,
            "candidate": self.candidate_s,
            "saving": self.saving_s,
            "transition": self.transition_s,
        }
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
            horizon_steps=self.horizon_steps,
            decision_s=self.decision_s,
            runner_ups=tuple(
                {"plan": r.plan.to_json(), "predicted_s": r.predicted_s, "reason": r.reason}
                for r in self.runner_ups
            ),
            bounds_s={k: [i.low_s, i.high_s] for k, i in bounds.items() if i is not None},
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
    steps_since_transition: int | None,
    decision_s: float,
    saving: Interval | None = None,
    why: str | None = None,
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
        policy: thresholds.
        steps_since_transition: None when there was none yet.
        decision_s: seconds spent on thinking so far.
        saving: `CostModel.saving` of the two plans, in which shared uncertainty cancels; without
            it, the bounds of both steps are taken as independent.
        why: what is wrong with the current plan, where ``current`` is None.
    """
    chosen = candidate.best
    if current is not None and saving is None:
        saving = _independent(current.step.step, chosen.step.step)
    if current is None:
        saving = None
    path, admitted, rule = _judge(
        current, current_plan, chosen, transition, crossing, policy, steps_since_transition,
        saving, why,
    )  # fmt: skip
    rule = "; ".join([rule, *candidate.relaxed])
    return Decision(
        step=step,
        trigger=trigger,
        path=path,
        admitted=admitted,
        rule=rule,
        current_plan=current_plan,
        candidate_plan=chosen.plan,
        current_s=None if current is None else current.step.step,
        candidate_s=chosen.step.step,
        saving_s=saving,
        transition_s=transition,
        horizon_steps=crossing.steps,
        decision_s=decision_s,
        runner_ups=candidate.runner_ups,
    )


def _independent(before: Interval, after: Interval) -> Interval:
    mean_s = before.mean_s - after.mean_s
    below = math.hypot(before.mean_s - before.low_s, after.high_s - after.mean_s)
    above = math.hypot(before.high_s - before.mean_s, after.mean_s - after.low_s)
    return Interval(mean_s, mean_s - below, mean_s + above)


def _judge(
    current: Candidate | None,
    current_plan: Plan,
    chosen: Candidate,
    transition: Interval,
    crossing: Crossing,
    policy: PolicyConfig,
    steps_since_transition: int | None,
    saving: Interval | None,
    why: str | None,
) -> tuple[Path, bool, str]:
    if current is None or saving is None:
        return "urgent", True, f"{why or 'the current plan cannot go on'}: profit is not asked"
    if chosen.plan == current_plan:
        return "opportunistic", False, "the current plan is the best one"
    relative = saving.mean_s / current.step.step.mean_s
    if steps_since_transition is not None and steps_since_transition < policy.cooldown_steps:
        rule = (
            f"cooldown: {steps_since_transition} steps since the last transition, "
            f"fewer than {policy.cooldown_steps}"
        )
        return "opportunistic", False, rule
    if relative < policy.min_saving:
        rule = (
            f"hysteresis: the saving is {relative:.1%} of a step, "
            f"less than the least worth a change, {policy.min_saving:.1%}"
        )
        return "opportunistic", False, rule
    saved_s = saving.low_s * crossing.steps
    repaid = saved_s >= transition.high_s
    due = "the cap" if crossing.signal == "none" else f"{crossing.signal} expected to change then"
    rule = (
        f"payback: at least {saving.low_s:.3g} s per step x {crossing.steps:.3g} steps ({due}) = "
        f"{saved_s:.3g} s, "
        f"{'repays' if repaid else 'does not repay'} a transition of "
        f"up to {transition.high_s:.3g} s"
    )
    return "opportunistic", repaid, rule


def explain_event(event: Decided) -> str:
    """Explain a decision from its record alone: trigger, plans, bounds, payback, rule, losers."""
    verdict = "admitted" if event.admitted else "not admitted"
    lines = [
        f"step {event.step}: {event.path} decision, {verdict} "
        f"(woken by {event.trigger}; thought for {event.decision_s * 1e3:.3g} ms)"
    ]
    now = _seconds(event, "current", event.current_s) or "cannot go on"
    lines.append(f"  current    {_plan(event.current_plan)}: {now}")
    if event.candidate_plan is not None:
        then = _seconds(event, "candidate", event.candidate_s)
        lines.append(f"  candidate  {_plan(event.candidate_plan)}: {then}")
    saving = _seconds(event, "saving", event.saving_s)
    transition = _seconds(event, "transition", event.transition_s)
    if saving:
        lines.append(f"  saving     {saving} per step")
    if transition:
        lines.append(f"  transition {transition}")
    if event.saving_s is not None and event.horizon_steps is not None:
        low_s = event.bounds_s.get("saving", [event.saving_s])[0]
        lines.append(
            f"  payback    {low_s:.3g} s x {event.horizon_steps:.3g} steps = "
            f"{low_s * event.horizon_steps:.3g} s"
        )
    lines.append(f"  rule       {event.rule}")
    lines += _losers(event.runner_ups)
    return "\n".join(lines)


def _seconds(event: Decided, name: str, mean_s: float | None) -> str:
    if mean_s is None:
        return ""
    low_high = event.bounds_s.get(name)
    bounds = f" ({low_high[0]:.3g} to {low_high[1]:.3g})" if low_high else ""
    return f"{mean_s:.3g} s{bounds}"


def _plan(value: Json) -> str:
    return str(Plan.from_json(value))


def _losers(runner_ups: Sequence[Json]) -> list[str]:
    return [
        f"  lost       {_plan(r['plan'])}: {r['predicted_s']:.3g} s, {r['reason']}"
        for r in runner_ups
    ]
