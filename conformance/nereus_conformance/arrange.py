"""Arranger: launches jobs whose plan puts the stage under test where a case wants it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus_conformance.subject import Subject
from nereus_conformance.suite import Suite
from nereus_conformance.ties import cannot, require_kept, tied
from nereus_core.capabilities import Feature
from nereus_core.cluster import Device
from nereus_core.harness import Harness, StepResult
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    REF_INFER,
    Algorithm,
    Job,
    ModelStage,
    Stage,
)

ONE = Layout(1, 1)
MODEL_STAGES = {
    Stage.TRAIN: ACTOR_TRAIN,
    Stage.GENERATE: ACTOR_GENERATE,
    Stage.INFER: REF_INFER,
}


class Arranger:
    """Launches jobs; the session has one harness, a case asks for one launch or two."""

    def __init__(self, suite: Suite, harness: Harness) -> None:
        self._suite, self._harness = suite, harness
        self._fixed: dict[tuple[Algorithm, int], list[StepResult]] = {}

    def job(self, algorithm: Algorithm = "grpo", *, asynchronous: bool = False) -> Job:
        """Return the harness's job; asynchronous where that is asked, or all of its jobs are."""
        job = self._harness.job(algorithm)
        if not asynchronous:
            return job
        return replace(job, workload=replace(job.workload, asynchronous=True))

    def __call__(
        self,
        stage: Stage | ModelStage = Stage.TRAIN,
        layout: Layout = ONE,
        num_units: int = 1,
        *,
        spare: int = 0,
        job: Job | None = None,
        others: Layout = ONE,
    ) -> Subject:
        """Launch a job.

        The stage under test takes the first devices, then come the spare ones; every other stage
        has one unit, each on a device of its own if there are enough. Where there are not, stages
        share devices; an adapter that cannot colocate skips the case. Stages tied to another hold
        its devices, all of them.
        """
        job = job or self.job()
        under_test = stage if isinstance(stage, ModelStage) else MODEL_STAGES[stage]
        devices = job.cluster.healthy
        own = layout.num_devices * num_units
        rest = list(devices[own + spare :]) or list(devices[:own])
        plan = {under_test: Placement.packed(layout, devices[:own])}
        waiting: list[ModelStage] = []
        bound: dict[ModelStage, ModelStage] = {}
        for other in (s for s in job.workload.stages if s != under_test):
            placed = [s for s in tied(job, other) if s == under_test or s in waiting]
            if placed:
                bound[other] = placed[0]
            else:
                waiting.append(other)
        if len(waiting) * others.num_devices > len(devices) - own - spare:
            self._colocate()
        for index, other in enumerate(waiting):
            at = (index * others.num_devices) % len(rest)
            chosen = tuple((rest * 2)[at : at + others.num_devices])
            plan[other] = Placement(others, (chosen,))
        for other, partner in bound.items():
            plan[other] = self._beside(job, plan[partner], others, other, partner)
        return self.launch(job, Plan(plan), under_test, devices[own : own + spare])

    def _beside(
        self, job: Job, placed: Placement, layout: Layout, other: ModelStage, partner: ModelStage
    ) -> Placement:
        """Place a stage on the devices of the one that it is tied to."""
        self._colocate()
        devices = tuple(d for unit in placed.units for d in unit)
        if len(devices) % layout.num_devices:
            cannot(other, partner, f"its units of {layout} do not fill {len(devices)} devices")
        found = Placement.packed(layout, devices)
        if job.global_batch % found.dp:
            cannot(other, partner, f"its {found.dp} units do not divide {job.global_batch} prompts")
        return found

    def everywhere(self, stage: Stage, layout: Layout, *, algorithm: Algorithm = "grpo") -> Subject:
        """Launch a job in which every stage is on all four devices in one layout."""
        self._colocate()
        job = self.job(algorithm)
        placement = Placement.packed(layout, job.cluster.healthy)
        plan = Plan(dict.fromkeys(job.workload.stages, placement))
        return self.launch(job, plan, MODEL_STAGES[stage], ())

    def launch(
        self, job: Job, plan: Plan, under_test: ModelStage, spare: tuple[Device, ...] = ()
    ) -> Subject:
        """Launch a job under a plan; skips where the adapter cannot hold it, or ties forbid it."""
        for placement in plan.values():
            self._suite.require_layout(placement.layout)
        require_kept(job, plan)
        self._suite.report.launches += 1
        adapter = self._harness.launch(job, plan)
        return Subject(
            self._harness, adapter, job, plan, under_test, spare, self._suite.require_layout
        )

    def fixed(self, num_steps: int, algorithm: Algorithm = "grpo") -> list[StepResult]:
        """Return the steps of the job whose plan never changes; run once per session.

        Call it before the case launches its own job, which ends this one.
        """
        key = (algorithm, num_steps)
        if key not in self._fixed:
            subject = self(job=self.job(algorithm))
            self._fixed[key] = [subject.step() for _ in range(num_steps)]
        return self._fixed[key]

    def _colocate(self) -> None:
        if not self._suite.holds(Feature.COLOCATED_STAGES):
            pytest.skip("the arrangement needs COLOCATED_STAGES, which the adapter has not")
