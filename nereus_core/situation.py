"""Situation: what runs, on what, and why it cannot go on like this, if it cannot."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from nereus_core.adapter import Adapter
from nereus_core.cluster import Device
from nereus_core.cost import CostModel, Lengths
from nereus_core.plan import Plan, plan_problems
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import Job


@dataclass(frozen=True, slots=True)
class Situation:
    """One look at a job."""

    job: Job
    """On the devices that plans may use: healthy and not draining."""
    units: UnitMap
    """Intact units; those on draining devices among them."""
    plan: Plan
    """What the units stand for, or the last plan where they stand for none."""
    lost_units: tuple[UnitId, ...] = ()
    problem: str | None = None
    """Why the job cannot take another step like this, other than memory."""
    memory_problem: str | None = None
    """Why the plan is predicted not to fit in memory."""

    @classmethod
    def of(
        cls,
        adapter: Adapter,
        usable: Collection[Device],
        last: Situation | None,
        cost: CostModel,
        lengths: Lengths,
    ) -> Self:
        """Look through the adapter; units of ``last`` that are not there have been lost."""
        job, units = adapter.job(), adapter.units()
        job = job.on(job.cluster.without(d for d in job.cluster.devices if d not in usable))
        lost = tuple(u for u in (last.units if last else ()) if u not in units)
        plan = Plan.of_units(units)
        problems = [f"{unit} is lost" for unit in lost] + list(plan_problems(plan, job))
        if problems:
            return cls(job, units, last.plan if last else plan, lost, "; ".join(problems))
        memory_problem = cost.on(job).memory_problem(plan, lengths)
        return cls(job, units, plan, memory_problem=memory_problem)

    @property
    def usable(self) -> frozenset[Device]:
        """Devices that plans may use."""
        return frozenset(self.job.cluster.healthy)

    @property
    def urgent(self) -> bool:
        """Whether the plan must change before the next step."""
        return bool(self.problem or self.memory_problem)
