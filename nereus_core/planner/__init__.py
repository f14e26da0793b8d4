"""The planner: the fastest plan that fits, exact on its space, and why others lost.

The space: model-stages are partitioned into groups; groups get disjoint runs of devices, nodes with
most healthy devices first, the largest group first (`groups`); the stages of a group share its
devices and run one after another where the algorithm would let them run at once. Each stage has any
layout whose tp fits in a node and any number of units that divides the global batch; it need not
use all devices of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from nereus_core.cost import CostModel, Lengths, StepCost
from nereus_core.errors import NoFeasiblePlan
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.planner.bounds import TIE, Bounds, partitions
from nereus_core.planner.colocating import least_s
from nereus_core.planner.constraints import Constraints
from nereus_core.planner.nearest import tightest
from nereus_core.planner.placing import Placer
from nereus_core.planner.search import Found, search
from nereus_core.planner.space import Space
from nereus_core.planner.watch import Watch
from nereus_core.workload import Job

__all__ = ["Candidate", "Constraints", "Planned", "RunnerUp", "Watch", "best", "still_good"]

_RUNNER_UPS = 5
_CURRENT = "the current plan: "


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what a step under it is predicted to cost."""

    plan: Plan
    step: StepCost


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that lost."""

    plan: Plan
    predicted_s: float
    reason: str
    """In words: slower by how much, or which device lacks how much memory."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The result of planning."""

    best: Candidate
    searched: int
    """Arrangements of groups that were solved exactly; bounds ruled out the others."""
    relaxed: tuple[str, ...]
    """Least numbers of units that could not be had, in words."""
    _losers: Callable[[], tuple[RunnerUp, ...]] = field(repr=False, compare=False)

    @property
    def runner_ups(self) -> tuple[RunnerUp, ...]:
        """Plans that lost, fastest first, the ones that do not fit last; worked out when read."""
        return self._losers()


def best(
    cost: CostModel, lengths: Lengths, constraints: Constraints, current: Plan | None = None
) -> Planned:
    """Find the plan with the shortest predicted step.

    Deterministic. Among plans equally fast (within 1e-9) the one that moves fewest bytes from
    ``current`` wins; stages it leaves alone keep their devices in their order.

    Raises:
        NoFeasiblePlan: nothing fits in memory, or constraints leave a stage no layout.
    """
    running = None if current is None else _intact(current, cost.job)
    space, found = _searched(cost, lengths, constraints, running)
    if not found.best and constraints.min_dp:
        space, found = _searched(cost, lengths, constraints.asking({}), running)
    if not found.best:
        raise NoFeasiblePlan(space.num_devices, tightest(space))
    placer = Placer(space, running)
    plan = _chosen(placer, found, current)
    chosen = Candidate(plan, cost.step(plan, lengths))
    relaxed = tuple(
        f"{stage} has {plan[stage].dp} of the {asked} units asked for at least"
        for stage, asked in sorted(constraints.min_dp.items())
        if stage in plan and plan[stage].dp < asked
    )
    losers = cache(lambda: _runner_ups(placer, found, chosen))
    return Planned(chosen, found.searched, relaxed, losers)


def _searched(
    cost: CostModel, lengths: Lengths, constraints: Constraints, running: Plan | None
) -> tuple[Space, Found]:
    space = Space.of(cost, lengths, constraints, running)
    return space, search(space)


def still_good(
    cost: CostModel, lengths: Lengths, constraints: Constraints, current: Plan, delta: float
) -> bool:
    """Whether the current plan fits and is within ``delta`` of the best possible, by bounds alone.

    No search: every assignment of devices to two groups or more takes at least its slowest stages
    each alone, and all stages on one group at least their seconds with a price on the memory that
    they share. False may also mean that the bounds are too weak to tell. `Watch` answers the same
    from what it has worked out before.
    """
    if plan_problems(current, cost.job):
        return False
    try:
        space = Space.of(cost, lengths, constraints, current)
    except NoFeasiblePlan:  # constraints leave some stage nothing: not what runs, either
        return False
    if not _usable(space, current):
        return False
    between_s = cost.between.seconds
    limit_s = cost.step(current, lengths).step.mean_s / (1 + delta) - between_s
    bounds = Bounds(space, space.least_s())
    all_ways = partitions(len(space.stages), space.together, space.apart)
    others = [p for p in all_ways if 1 < len(p) <= space.num_devices]
    beaten = [p for p, b in zip(others, bounds.of_partitions(others), strict=True) if b < limit_s]
    if any(len(bounds.assignments(p, limit_s * (1 - TIE))[0]) for p in beaten):
        return False
    if not space.shareable:
        return True
    return least_s(space.alone_together(), cost.capacity_bytes) >= limit_s * (1 - TIE)


def _intact(plan: Plan, job: Job) -> Plan:
    """What runs of a plan: units all of whose devices are healthy; a stage may have none left."""
    healthy = set(job.cluster.healthy)
    alive = {s: [u for u in p.units if healthy.issuperset(u)] for s, p in plan.items()}
    return Plan({s: Placement(plan[s].layout, tuple(u)) for s, u in alive.items() if u})


def _usable(space: Space, plan: Plan) -> bool:
    return (
        not plan_problems(plan, space.cost.job)
        and space.constraints.allows(plan, plan)
        and space.cost.memory_problem(plan, space.lengths) is None
    )


def _chosen(placer: Placer, found: Found, current: Plan | None) -> Plan:
    """Stay with the current plan when nothing is faster; else take the nearest of the best."""
    space = placer.space
    limit_s = found.best[0].seconds * (1 + TIE) + space.cost.between.seconds
    if (
        current is not None
        and _usable(space, current)
        and space.cost.step(current, space.lengths).step.mean_s <= limit_s
    ):
        return current
    return placer.nearest(found.best)


def _runner_ups(placer: Placer, found: Found, chosen: Candidate) -> tuple[RunnerUp, ...]:
    space, best_s = placer.space, chosen.step.step.mean_s
    seen, fit, unfit = [chosen.plan], list[RunnerUp](), list[RunnerUp]()

    def consider(plan: Plan, word: str = "") -> None:
        if plan in seen:
            return
        seen.append(plan)
        seconds = space.cost.step(plan, space.lengths).step.mean_s
        if problem := space.cost.memory_problem(plan, space.lengths):
            unfit.append(RunnerUp(plan, seconds, f"{word}does not fit: {problem}"))
        elif seconds > best_s * (1 + TIE):
            slower = f"{word}slower by {seconds / best_s - 1:.1%}"
            fit.append(RunnerUp(plan, seconds, slower))
        else:
            moves = "" if placer.current is None else ", moves more bytes"
            fit.append(RunnerUp(plan, seconds, f"{word}as fast{moves}"))

    if placer.current is not None and not plan_problems(placer.current, space.cost.job):
        consider(placer.current, _CURRENT)
    for plan in placer.variants(found.best[0]):
        consider(plan)
    for solution in (*found.best[1 : _RUNNER_UPS + 1], *found.others()):
        consider(placer.canonical(solution))
    consider(placer.unbounded(found.best[0]))
    return _shortest(fit, unfit)


def _shortest(fit: Sequence[RunnerUp], unfit: Sequence[RunnerUp]) -> tuple[RunnerUp, ...]:
    """The fastest, with room kept for one that does not fit and for the current plan."""
    mine = [r for r in fit if r.reason.startswith(_CURRENT)]
    others = sorted((r for r in fit if r not in mine), key=lambda r: r.predicted_s)
    room = _RUNNER_UPS - len(mine) - min(1, len(unfit))
    kept = sorted([*mine, *others[:room]], key=lambda r: r.predicted_s)
    return (*kept, *unfit[: _RUNNER_UPS - len(kept)])
