"""A job over a MemoryAdapter: each step takes what a hidden cost model says, times a factor."""

from __future__ import annotations

from memory_adapter import MemoryAdapter

from nereus_core.cost import CostModel, Lengths
from nereus_core.errors import UnitLost
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Plan
from nereus_core.workload import Job


class MemoryJob:
    """Steps on demand; devices are lost, drained and given back on demand."""

    def __init__(self, job: Job, plan: Plan, *, factor=1.0, **adapter_options):
        self.job, self.factor = job, factor
        self.adapter = MemoryAdapter(job, plan, **adapter_options)
        self.adapter.observed = self._observe
        self.adapter.plan_linked = plan
        self.truth = CostModel(job)
        self.step_number, self.tokens_mean = -1, 0.0
        self.peak_bytes: dict = {}

    def step(self, tokens_mean: float) -> None:
        """Run one RL step; raises UnitLost when units are gone and nothing was relinked."""
        running = {u for p in self.adapter.plan_linked.values() for u in p.units}
        alive = {u.devices for u in self.adapter.units().values()}
        if running - alive:
            raise UnitLost(sorted(running - alive), tuple(self.adapter.units()))
        self.tokens_mean = tokens_mean
        self.step_number += 1

    def fail(self, *devices) -> None:
        self.adapter.failed |= set(devices)

    def drain(self, *devices) -> None:
        self.adapter.draining |= set(devices)

    def give_back(self, *devices) -> None:
        """Healthy again, and empty: what was on them is gone."""
        self.adapter._units = self.adapter.units()
        self.adapter.failed -= set(devices)
        self.adapter.draining -= set(devices)

    def grow(self, job: Job) -> None:
        """The same job on a cluster of more devices."""
        self.job = self.adapter._job = job

    def _observe(self, adapter) -> Observation:
        tokens = TokenStats.of([round(self.tokens_mean)] * 16 if self.step_number >= 0 else [])
        prompt = TokenStats.of([self.job.max_prompt_tokens] * 16)
        healthy = frozenset(self.job.cluster.devices) - adapter.failed
        seen = Observation(
            self.step_number,
            0.0,
            {},
            prompt,
            tokens,
            dict(self.peak_bytes),
            healthy,
            frozenset(adapter.draining),
        )
        plan = Plan.of_units(adapter.units())
        if self.step_number < 0 or set(plan) != set(self.job.workload.stages):
            return seen
        cost = self.truth.step(plan, Lengths.of(seen))
        stage_s = {stage: s * self.factor for stage, s in cost.stage_s.items()}
        return Observation(
            seen.step,
            cost.step.mean_s * self.factor,
            stage_s,
            prompt,
            tokens,
            seen.peak_bytes,
            healthy,
            seen.draining,
        )
