"""Knowledge: what a controller has learned from its job so far. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from nereus_core.admission import Decision
from nereus_core.config import PolicyConfig
from nereus_core.cost import CostModel, EfficiencyTable, Lengths
from nereus_core.cost.op_classes import OpClass
from nereus_core.forecast import Forecaster
from nereus_core.observation import Observation
from nereus_core.plan import Plan
from nereus_core.situation import Situation
from nereus_core.triggers import Signals, Trigger, Triggers
from nereus_core.workload import Job


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Cost model, lengths, forecast and triggers after some steps."""

    cost: CostModel
    lengths: Lengths
    """Of the last step; before the first, what the job allows."""
    forecast: Forecaster
    triggers: Triggers
    step: int = -1
    """Last completed RL step."""
    steps_since_transition: int | None = None
    """None before the first transition."""
    plan_was_seen: bool = False
    """Whether the cost model has seen the current plan run."""
    postponed: Trigger | None = None
    """What the last decision was about, if it fell into the cooldown and was not admitted."""

    @classmethod
    def of_job(
        cls, job: Job, policy: PolicyConfig, measured: Mapping[OpClass, float] | None
    ) -> Self:
        """Start from priors, or from efficiencies measured elsewhere."""
        lengths = Lengths.of_job(job)
        cost = CostModel(
            job,
            EfficiencyTable.prior(job.cluster, measured),
            headroom=policy.memory_headroom,
            confidence=policy.confidence,
        )
        return cls(cost, lengths, Forecaster(), Triggers(policy, lengths.response_mean))

    def predicted_s(self, now: Situation) -> float:
        """Predict the next step."""
        return self.cost.on(now.job).step(now.plan, self.lengths).step.mean_s

    def stepped(self, plan: Plan, seen: Observation) -> Self:
        """Learn from a step that ran under ``plan``."""
        since = self.steps_since_transition
        return replace(
            self,
            cost=self.cost.refined(plan, seen),
            lengths=Lengths.of(seen),
            forecast=self.forecast.seen(seen),
            step=seen.step,
            steps_since_transition=None if since is None else since + 1,
            plan_was_seen=True,
        )

    def woken(self, signals: Signals) -> tuple[Self, Trigger | None]:
        """Take in what a boundary saw; return what woke the controller.

        What was postponed wakes it when the cooldown is over.
        """
        triggers, trigger = self.triggers.seen(signals)
        if trigger is None and not self.cooling:
            trigger = self.postponed
        return replace(self, triggers=triggers), trigger

    @property
    def cooling(self) -> bool:
        """Whether a transition is so recent that only urgent ones are admitted."""
        since = self.steps_since_transition
        return since is not None and since < self.triggers.policy.cooldown_steps

    def decided(self, decision: Decision, trigger: Trigger) -> Self:
        """Measure changes from here on."""
        refused = decision.path == "opportunistic" and not decision.admitted
        return replace(
            self,
            triggers=self.triggers.decided(self.lengths.response_mean),
            postponed=trigger if refused and self.cooling else None,
        )

    def attempted(self) -> Self:
        """A transition was tried: cool down, and trust no prediction for what runs now."""
        return replace(self, steps_since_transition=0, plan_was_seen=False)

    def transitioned(self, predicted_s: float, measured_s: float) -> Self:
        """Learn what a transition cost."""
        return replace(self, cost=self.cost.refined_transition(predicted_s, measured_s))
