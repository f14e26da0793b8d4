"""Knowledge: what a controller has learned from its job so far. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from nereus_core.admission import Decision, History
from nereus_core.config import PolicyConfig
from nereus_core.cost import CostModel, EfficiencyTable, Lengths
from nereus_core.cost.op_classes import OpClass
from nereus_core.forecast import Crossing, Forecaster
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Plan
from nereus_core.planner import Watch
from nereus_core.situation import Situation
from nereus_core.transition import TransitionGraph
from nereus_core.triggers import Levels, Signals, Trigger, Triggers, Wake
from nereus_core.workload import Job

_LONGEST_OF_STEPS = 8
"""Steps whose longest response memory is planned for: one step's longest is chance. Chosen."""
_RECHECK_STEPS = 4
"""Steps after which a refusal is looked at again; doubled each time it is refused. Chosen."""
_MAX_RECHECK_STEPS = 32
"""Longest pause between two looks at a refusal; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """A look at the plan that is due although no signal moves."""

    at_step: int
    pause_steps: int
    """Until the look after this one, should it refuse again."""
    why: str


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Cost model, lengths, forecast and triggers after some steps."""

    cost: CostModel
    lengths: Lengths
    """Of the last step, the longest response of the last few; at first, what the job allows."""
    forecast: Forecaster
    triggers: Triggers
    step: int = -1
    """Last completed RL step."""
    history: History = field(default_factory=History)
    plan_was_seen: bool = False
    """Whether the cost model has seen the current plan run."""
    recheck: Recheck | None = None
    longest: tuple[float, ...] = ()
    """Longest responses of the last steps."""
    watch: Watch | None = None
    """Of the plan that runs, since it was last found to be good."""

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
        triggers = Triggers(policy, Levels(lengths.response_mean))
        return cls(cost, lengths, Forecaster(), triggers, recheck=cls._settling(policy, -1))

    @staticmethod
    def _settling(policy: PolicyConfig, step: int) -> Recheck:
        """A plan is judged once more when it has been seen running for the cooldown."""
        steps = max(1, policy.cooldown_steps)
        why = f"the plan has run for {steps} steps"
        return Recheck(step + steps, _RECHECK_STEPS, why)

    def predicted_s(self, now: Situation) -> float:
        """Predict the next step."""
        return self.cost.on(now.job).step(now.plan, self.lengths).step.mean_s

    def stepped(self, plan: Plan, seen: Observation) -> Self:
        """Learn from a step that ran under ``plan``; lengths stay where it has no responses."""
        lengths, longest = self.lengths, self.longest
        if seen.response_tokens.count:
            lengths = Lengths.of(seen)
            longest = (*longest, lengths.response_max)[-_LONGEST_OF_STEPS:]
            lengths = replace(lengths, response_max=max(longest))
        since = self.history.steps_since_transition
        history = replace(
            self.history,
            steps_since_transition=None if since is None else since + 1,
            elapsed_s=self.history.elapsed_s + seen.step_s,
        )
        return replace(
            self,
            cost=self.cost.refined(plan, seen),
            lengths=lengths,
            longest=longest,
            forecast=self.forecast.seen(seen),
            step=seen.step,
            history=history,
            plan_was_seen=True,
        )

    def sampled(self, prompt: TokenStats, response: TokenStats) -> Self:
        """Take in the lengths of a batch before its step is done."""
        lengths = Lengths.of_tokens(prompt, response)
        longest = max((*self.longest, lengths.response_max))
        return replace(self, lengths=replace(lengths, response_max=longest))

    def crossing(self, job: Job) -> Crossing:
        """Forecast when the plan will be thought about again."""
        policy = self.triggers.policy
        left = None if job.num_steps is None else job.num_steps - self.step - 1
        return self.forecast.steps_to_crossing(
            policy.tokens_change,
            policy.max_horizon_steps,
            remaining_steps=left,
            confidence=policy.confidence,
        )

    def woken(self, signals: Signals) -> tuple[Self, Wake | None]:
        """Take in what a boundary saw; return what woke the controller."""
        triggers, wake = self.triggers.seen(signals)
        due = self.recheck
        if wake is None and due is not None and self.step >= due.at_step:
            wake = Wake(Trigger.RECHECK, due.why)
        return replace(self, triggers=triggers), wake

    @property
    def _cooling_steps(self) -> int:
        """Steps left of the cooldown."""
        since = self.history.steps_since_transition
        return 0 if since is None else max(0, self.triggers.policy.cooldown_steps - since)

    def decided(self, decision: Decision, wake: Wake, watch: Watch | None) -> Self:
        """Measure changes from here on; a refusal is looked at again, ever more rarely."""
        looked = wake.trigger is Trigger.RECHECK and self.recheck is not None
        recheck = None if looked else self.recheck
        refused = decision.path == "opportunistic" and not decision.admitted
        if refused and decision.candidate_plan != decision.current_plan:
            pause = self.recheck.pause_steps if looked and self.recheck else _RECHECK_STEPS
            wait = self._cooling_steps or pause
            longer = min(2 * pause, _MAX_RECHECK_STEPS)
            recheck = Recheck(
                self.step + wait, longer, f"a better plan was refused {wait} steps ago"
            )
        triggers = self.triggers.decided(self.lengths.response_mean)
        return replace(self, triggers=triggers, recheck=recheck, watch=watch)

    def lost_devices(self) -> Self:
        """Devices of the plan have left, or are about to: they may do so again."""
        return replace(self, forecast=self.forecast.lost())

    def attempted(self) -> Self:
        """A transition was tried: cool down, and trust no prediction for what runs now."""
        return replace(
            self,
            history=replace(
                self.history,
                steps_since_transition=0,
                transitions=self.history.transitions + 1,
            ),
            plan_was_seen=False,
            recheck=self._settling(self.triggers.policy, self.step),
            triggers=self.triggers.changed(),
            watch=None,
        )

    def transitioned(self, graph: TransitionGraph, cost: CostModel, measured_s: float) -> Self:
        """Learn what a transition took; ``cost`` is what it was predicted with."""
        elapsed_s = self.history.elapsed_s + measured_s
        path = graph.longest(cost)
        return replace(
            self,
            cost=self.cost.refined_transition(
                path, graph.atlas, measured_s, graph.parked(graph.by_id)
            ),
            history=replace(self.history, elapsed_s=elapsed_s),
        )
