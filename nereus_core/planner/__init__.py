"""The planner: the memory-feasible plan with the lowest predicted steady-state step latency.

Exact on its space: every partition of the model-stages into groups that share devices, every size
of the groups, every layout and degree of each stage. What is left out cannot win: options beaten in
seconds and bytes, and groupings one of whose groups alone takes longer than the best plan so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from nereus_core.cluster import Device
from nereus_core.cost import CostModel, Lengths, StepCost
from nereus_core.cost.step import step_seconds
from nereus_core.errors import NoFeasiblePlan
from nereus_core.plan import Plan, plan_problems
from nereus_core.planner.assign import assign
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.space import (
    Combination,
    Option,
    combinations,
    compositions,
    frontier,
    options,
    partitions,
)
from nereus_core.workload import ModelStage

__all__ = ["Candidate", "Constraints", "Planned", "RunnerUp", "best", "still_good"]

_KEPT = 8  # best groupings that are laid over devices and compared exactly; chosen
_TIE = 1e-9  # relative difference below which two plans are equally fast; chosen


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and its predicted cost."""

    plan: Plan
    step: StepCost


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that lost, and why."""

    plan: Plan
    predicted_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's answer."""

    best: Candidate
    runner_ups: tuple[RunnerUp, ...]
    searched: int
    """Groupings whose step seconds were computed."""


@dataclass(frozen=True, slots=True)
class _Grouping:
    seconds: float
    groups: tuple[tuple[Combination, int], ...]


def best(
    cost: CostModel, lengths: Lengths, constraints: Constraints, current: Plan | None = None
) -> Planned:
    """Return the fastest feasible plan and what lost against it. Deterministic.

    Plans that are equally fast are ordered by bytes to move from ``current``, then by their text.

    Raises:
        NoFeasiblePlan: nothing fits; says what came nearest.
    """
    devices = _usable(cost, constraints)
    tables = _tables(cost, lengths, constraints, devices, current)
    groupings, searched, smallest = _search(cost, constraints, tables, len(devices))
    if not groupings:
        raise NoFeasiblePlan(len(devices), _lacking(cost, tables, smallest))
    plans = {assign(g.groups, devices, current): None for g in groupings[:_KEPT]}
    if current is not None and _possible(cost, lengths, constraints, current):
        plans[current] = None
    ranked = sorted((Candidate(plan, cost.step(plan, lengths)) for plan in plans), key=_rank)
    fastest = ranked[0].step.step.mean_s
    ties = [c for c in ranked if c.step.step.mean_s <= fastest * (1 + _TIE)]
    winner = min(ties, key=lambda c: (_changes(current, c.plan), str(c.plan)))
    lost = tuple(
        RunnerUp(c.plan, c.step.step.mean_s, _reason(c, winner)) for c in ranked if c is not winner
    )
    return Planned(winner, lost[:5], searched)


def still_good(
    cost: CostModel, lengths: Lengths, constraints: Constraints, current: Plan, delta: float
) -> bool:
    """Whether the current plan is within ``delta`` of a bound that no plan beats; no search.

    The bound lets every stage have all devices to itself: the dataflow of the fastest options.
    """
    if not _possible(cost, lengths, constraints, current):
        return False
    tables = _tables(cost, lengths, constraints, _usable(cost, constraints), current)
    if not all(tables.values()):
        return False
    fastest = {stage: table[0].seconds for stage, table in tables.items()}
    bound = step_seconds(cost.job.workload, fastest, lambda one, other: False)
    return cost.step(current, lengths).step.mean_s <= bound * (1 + delta)


def _usable(cost: CostModel, constraints: Constraints) -> tuple[Device, ...]:
    devices = tuple(d for d in cost.job.cluster.healthy if d not in constraints.excluded)
    if not devices:
        raise NoFeasiblePlan(0, "no healthy device is left")
    return devices


def _tables(
    cost: CostModel,
    lengths: Lengths,
    constraints: Constraints,
    devices: tuple[Device, ...],
    current: Plan | None,
) -> dict[ModelStage, tuple[Option, ...]]:
    nodes = [d.node for d in devices]
    per_node = min(nodes.count(node) for node in set(nodes))
    return {
        stage: options(cost, lengths, constraints, stage, len(devices), per_node, current)
        for stage in cost.job.workload.stages
    }


def _search(
    cost: CostModel,
    constraints: Constraints,
    tables: dict[ModelStage, tuple[Option, ...]],
    num_devices: int,
) -> tuple[list[_Grouping], int, Combination | None]:
    """Return the best groupings, fastest first, how many were computed, and the nearest misfit."""
    workload, found, searched = cost.job.workload, list[_Grouping](), 0
    smallest: Combination | None = None

    @cache
    def feasible(
        group: tuple[ModelStage, ...], size: int
    ) -> tuple[tuple[Combination, ...], Combination | None]:
        return combinations([frontier(tables[s], size) for s in group], cost.capacity_bytes)

    limit = float("inf")
    for groups in partitions(workload.stages):
        if not constraints.may_group(tuple(map(frozenset, groups))):
            continue
        home = {stage: i for i, group in enumerate(groups) for stage in group}
        for sizes in compositions(num_devices, len(groups)):
            choices = []
            for group, size in zip(groups, sizes, strict=True):
                fitting, misfit = feasible(group, size)
                if misfit and (smallest is None or misfit.need_bytes < smallest.need_bytes):
                    smallest = misfit
                # Stages of a group take turns, so their sum is a lower bound of the step.
                fitting = tuple(c for c in fitting if sum(o.seconds for o in c.options) <= limit)
                choices.append(fitting)
            if not all(choices):
                continue
            for chosen in product(*choices):
                searched += 1
                seconds = {o.stage: o.seconds for c in chosen for o in c.options}
                step_s = step_seconds(workload, seconds, partial(_together, home))
                if step_s <= limit:
                    found.append(_Grouping(step_s, tuple(zip(chosen, sizes, strict=True))))
                    if len(found) > 4 * _KEPT:
                        found = _best_of(found)
                        limit = found[-1].seconds
    return _best_of(found), searched, smallest


def _together(home: dict[ModelStage, int], one: ModelStage, other: ModelStage) -> bool:
    return home[one] == home[other]


def _best_of(found: Sequence[_Grouping]) -> list[_Grouping]:
    return sorted(found, key=lambda g: g.seconds)[:_KEPT]


def _possible(cost: CostModel, lengths: Lengths, constraints: Constraints, plan: Plan) -> bool:
    return (
        not plan_problems(plan, cost.job)
        and plan.devices.isdisjoint(constraints.excluded)
        and cost.memory_problem(plan, lengths) is None
    )


def _rank(candidate: Candidate) -> tuple[float, str]:
    return candidate.step.step.mean_s, str(candidate.plan)


def _changes(current: Plan | None, plan: Plan) -> int:
    """Devices of stages that differ from the current plan: a stand-in for bytes to move."""
    if current is None:
        return 0
    return sum(len(plan[stage].devices) for stage in plan if current.get(stage) != plan[stage])


def _reason(candidate: Candidate, winner: Candidate) -> str:
    slower = candidate.step.step.mean_s / winner.step.step.mean_s - 1
    return f"slower by {slower:.1%}" if slower > _TIE else "equally fast, moves more"


def _lacking(
    cost: CostModel,
    tables: dict[ModelStage, tuple[Option, ...]],
    smallest: Combination | None,
) -> str:
    empty = [str(stage) for stage, table in tables.items() if not table]
    if empty:
        return f"no layout of {', '.join(empty)} is allowed there"
    if smallest is None:
        return "stages that must not share devices do not find enough of them"
    names = ", ".join(f"{o.stage} {o.layout}dp{o.dp}" for o in smallest.options)
    return (
        f"{names} needs {smallest.need_bytes / 2**30:.2f} GiB on a device with "
        f"{cost.capacity_bytes / 2**30:.2f} GiB usable"
    )
