"""Ties: stages of a job that live in the same processes, and what that demands of a case.

`Job.together` names them. They hold the same devices whenever the job is linked to a plan: a case
that moves one of them moves the others, and one that wants them apart cannot be arranged.
"""

from __future__ import annotations

import pytest

from nereus_core.plan import Plan
from nereus_core.workload import Job, ModelStage


def tied(job: Job, stage: ModelStage) -> tuple[ModelStage, ...]:
    """Return the stages that hold the devices of a stage, in the order of the workload."""
    groups = [group for group in job.together if stage in group]
    return tuple(s for s in job.workload.stages if s != stage and any(s in g for g in groups))


def require_kept(job: Job, plan: Plan) -> None:
    """Skip a case whose plan has tied stages on different devices."""
    for stage in plan:
        for other in tied(job, stage):
            if other in plan and plan[other].devices != plan[stage].devices:
                cannot(other, stage, "the case wants them on different devices")


def require_apart(job: Job, stage: ModelStage, other: ModelStage) -> None:
    """Skip a case that wants units of two stages on devices of their own."""
    if other in tied(job, stage):
        cannot(other, stage, "the case wants a unit of each on devices of its own")


def cannot(other: ModelStage, stage: ModelStage, why: str) -> None:
    """Skip a case that a tie rules out."""
    pytest.skip(f"{other} is tied to {stage}: {why}")
