"""Completion time of compiled graphs against the exact optimum, and against a bound beyond."""

from __future__ import annotations

import random
import statistics
from typing import Any

from ortools.sat.python import cp_model

from nereus_core.cluster import DeviceSpec
from nereus_core.cost import CostModel
from nereus_core.device_specs import H100_SXM
from nereus_core.errors import Infeasible, PlanError
from nereus_core.transition import compile_transition
from transitions.instances import AMPLE, random_change, units_of
from transitions.scheduling import Problem

TICK_S = 1e-4
"""Of the solver's clock; primitives take 20 ms and more."""
LIMIT_S = 10.0
BAR = 0.069


def optimality(*, quick: bool) -> dict[str, Any]:
    """Solve random transitions of PPO jobs; report gaps.

    CP-SAT knows of no capacity: where memory is tight (80 GB hold little more than the plans), its
    optimum may not be executable, and the gap to it is reported apart.
    """
    solved: list[float] = []
    unsolved: list[float] = []
    beyond: list[float] = []
    rng = random.Random(0)
    for num_devices, instances in ((8, 10 if quick else 60), (16, 10 if quick else 60)):
        for problem in _problems(rng, num_devices, instances):
            best_s, proven = exact(problem)
            (solved if proven else unsolved).append(problem.found_s / best_s - 1)
    tight = []
    for problem in _problems(rng, 16, 6 if quick else 30, H100_SXM):
        tight.append(problem.found_s / exact(problem)[0] - 1)  # noqa: PERF401
    for num_devices, instances in ((64, 5 if quick else 30), (1024, 2 if quick else 10)):
        for problem in _problems(rng, num_devices, instances):
            beyond.append(problem.found_s / problem.bound_s - 1)  # noqa: PERF401
    return {
        "bar": BAR,
        "proven": len(solved),
        "gap_max": round(max(solved), 4),
        "gap_mean": round(statistics.mean(solved), 4),
        "above_bar": sum(gap > BAR for gap in solved),
        "unproven": len(unsolved),
        "unproven_gap_max": round(max(unsolved, default=0.0), 4),
        "tight": len(tight),
        "tight_gap_max_without_capacity": round(max(tight), 4),
        "beyond": len(beyond),
        "bound_gap_median": round(statistics.median(beyond), 4),
        "bound_gap_max": round(max(beyond), 4),
    }


def _problems(
    rng: random.Random, num_devices: int, count: int, spec: DeviceSpec = AMPLE
) -> list[Problem]:
    found: list[Problem] = []
    while len(found) < count:
        job, before, after = random_change(rng, num_devices, spec)
        cost = CostModel(job)
        try:
            graph = compile_transition(units_of(before), after, job, prefix="t")
        except (Infeasible, PlanError):
            continue  # a plan that does not fit in memory is no instance
        if len(graph.ops) > 1:
            found.append(Problem.of(graph, cost))
    return found


def exact(problem: Problem) -> tuple[float, bool]:
    """Return the least completion time that CP-SAT finds, and whether it is proven least."""
    model = cp_model.CpModel()
    ticks = [round(s / TICK_S) for s in problem.seconds]
    horizon = sum(ticks)
    starts = [model.new_int_var(0, horizon, f"s{i}") for i in range(len(ticks))]
    spans = [
        model.new_fixed_size_interval_var(s, d, f"i{i}")
        for i, (s, d) in enumerate(zip(starts, ticks, strict=True))
    ]
    end = model.new_int_var(0, horizon, "end")
    for i, d in enumerate(ticks):
        model.add(end >= starts[i] + d)
    for first, then in problem.before:
        model.add(starts[then] >= starts[first] + ticks[first])
    for ops in problem.apart:
        model.add_no_overlap([spans[i] for i in ops])
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = LIMIT_S
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    return solver.objective_value * TICK_S, status == cp_model.OPTIMAL
