"""Policies: rules of admission as plain values, so that they can be compared on the same trace.

What they share: the planner, the transition compiler, the triggers, and the urgent path, on which a
plan that cannot go on is left whatever that costs. They differ in which plans they consider
(`Policy.layouts`) and in what an opportunistic transition has to show (`Policy.rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from nereus_core.config import Admission, PolicyConfig
from nereus_core.cost import Interval
from nereus_core.forecast import Crossing


@dataclass(frozen=True, slots=True)
class Offer:
    """An opportunistic transition to judge: what it saves, what it costs, what came before."""

    current_s: Interval
    """Seconds of a step as it is."""
    candidate_s: Interval
    saving_s: Interval
    """Per step; shared uncertainty cancels in it."""
    transition_s: Interval
    crossing: Crossing
    steps_since_transition: int | None
    """None when there was none yet."""
    transitions: int
    """So far."""
    elapsed_s: float
    """The job's age."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says."""

    admitted: bool
    rule: str
    """The rule that fired, in words with values."""


Rule = Callable[[Offer, PolicyConfig], Verdict]


@dataclass(frozen=True, slots=True)
class Policy:
    """How opportunistic transitions are found and judged."""

    name: Admission
    layouts: Literal["free", "kept"]
    """``kept``: only the number of units may change, layouts and colocation stay."""
    rule: Rule | None
    """None: no opportunistic transition is looked for."""
    source: str
    """Whose rule it is."""


def payback(offer: Offer, policy: PolicyConfig) -> Verdict:
    """The saving repays the transition before the trigger is expected to cross again.

    First hysteresis: a cooldown after each transition, unless the steps to wait for would save more
    than the change may cost; and a saving that, even at its upper bound, is a least part of a step.
    Then the lower bound of the saving, over the expected steps, against the upper bound of the
    cost: what passes repays even if both are as bad as they may be.

    What does not may still be worth a trial, since a plan is judged again once it has been seen
    running (`nereus_core.knowledge`) and what was learned of its layouts stays. A trial is worth
    the expected saving until it is judged; from then on what is expected of the better of the two
    plans, which is more than the expected saving, the more so the less is known; less the
    transition, and the way back as often as the saving proves a loss.
    """
    since = offer.steps_since_transition
    wait = 0 if since is None else policy.cooldown_steps - since
    if wait > 0 and offer.saving_s.mean_s * wait < offer.transition_s.high_s:
        return Verdict(
            False,
            f"cooldown: {since} steps since the last transition, fewer than "
            f"{policy.cooldown_steps}, and waiting for the others costs no more than a transition",
        )
    most = offer.saving_s.high_s / offer.current_s.mean_s
    if most < policy.min_saving:
        return Verdict(
            False,
            f"hysteresis: the saving is {most:.1%} of a step at most, "
            f"less than the least worth a change, {policy.min_saving:.1%}",
        )
    steps, cost_s, low_s = offer.crossing.steps, offer.transition_s.high_s, offer.saving_s.low_s
    repaid = low_s > 0 and low_s * steps >= cost_s
    rule = (
        f"payback: at least {low_s:.3g} s per step x {steps:.3g} steps "
        f"({_DUE[offer.crossing.signal]}) = {low_s * steps:.3g} s, "
        f"{'repays' if repaid else 'does not repay'} a transition of up to {cost_s:.3g} s"
    )
    if repaid:
        return Verdict(True, rule)
    worth_s = _trial_s(offer, policy)
    return Verdict(
        worth_s > 0,
        f"{rule}; a trial of {max(1, policy.cooldown_steps)} steps is worth {worth_s:.3g} s, "
        f"the transition{' and the way back' if low_s < 0 else ''} paid",
    )


def _trial_s(offer: Offer, policy: PolicyConfig) -> float:
    """Expected seconds that trying a plan gains, given that it is left again if it is slower."""
    saving, steps, each_s = offer.saving_s, offer.crossing.steps, offer.transition_s.mean_s
    if saving.mean_s <= 0:
        return -each_s
    trial = min(steps, max(1, policy.cooldown_steps))
    bound = max(1e-9, NormalDist().inv_cdf(policy.confidence))
    deviation_s = max((saving.mean_s - saving.low_s) / bound, 1e-12 * saving.mean_s)
    as_normal = NormalDist(saving.mean_s, deviation_s)
    loss = as_normal.cdf(0.0)
    better_s = saving.mean_s * (1 - loss) + deviation_s**2 * as_normal.pdf(0.0)
    return trial * saving.mean_s + (steps - trial) * better_s - each_s * (1 + loss)


_DUE = {
    "tokens": "then response lengths are expected to have moved",
    "devices": "then devices are expected to leave",
    "end": "then the job ends",
    "none": "the cap: nothing is in sight",
}


def any_saving(offer: Offer, policy: PolicyConfig) -> Verdict:
    """Any expected saving is enough; the cost of the transition is not asked."""
    saves = offer.saving_s.mean_s > 0
    return Verdict(saves, f"saving > 0: {offer.saving_s.mean_s:.3g} s per step expected")


def history_discount(offer: Offer, policy: PolicyConfig) -> Verdict:
    """The new throughput, discounted by the job's history of transitions, exceeds the old one.

    The discount is ``(T - n S) / (T + S)``: of a job T old that has spent n transitions of S, the
    part of time left for work if it goes on like this. It is waived while T < S, when a job is so
    young that it has no history to speak of.
    """
    age_s, each_s = offer.elapsed_s, offer.transition_s.mean_s
    young = age_s < each_s
    discount = 1.0 if young else max(0.0, (age_s - offer.transitions * each_s) / (age_s + each_s))
    gain = offer.current_s.mean_s / offer.candidate_s.mean_s
    admitted = gain * discount > 1
    return Verdict(
        admitted,
        f"history discount: throughput x {gain:.3f}, discounted by {discount:.3f} "
        f"({'waived, the job is young' if young else f'{offer.transitions} transitions so far'}), "
        f"{'exceeds' if admitted else 'does not exceed'} what runs",
    )


POLICIES: Mapping[Admission, Policy] = {
    p.name: p
    for p in (
        Policy(
            "payback", "free", payback,
            "ours: a saving repays its transition before the trigger is expected to cross again",
        ),
        Policy(
            "history-discount", "free", history_discount,
            "Sia (Subramanya et al., SOSP 2023) and Pollux (Qiao et al., OSDI 2021): restart "
            "factor on every allocation other than the present one",
        ),
        Policy(
            "saving>0", "free", any_saving,
            "DynaRL-style admission, as the Nereus paper describes its baseline: a lower predicted "
            "step latency is enough",
        ),
        Policy(
            "dp-scaling-only", "kept", any_saving,
            "elastic data parallelism (TorchElastic; Varuna, Athlur et al., EuroSys 2022): the "
            "start-up layout stays, replicas follow the devices",
        ),
        Policy(
            "never", "kept", None,
            "a fixed start-up configuration: replicas are dropped when their devices leave, and "
            "nothing else changes",
        ),
    )
}  # fmt: skip
