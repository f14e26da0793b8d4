"""The planner's space as an integer program for SCIP: the judge of its optima and of its speed.

Same tables, same space: slots hold groups of stages, the largest first; a slot's span (size, and
where in a node it starts) says which options fit and what they cross. Per stage and slot one binary
per undominated option. Tight: a stage's seconds bound its level whatever slot it is in, the
device-seconds of a level bound it too, and an option excludes every span that it does not fit as a
clique, not one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from pyscipopt import Model, quicksum

from nereus_core.planner.groups import Shape, shape_between
from nereus_core.planner.pareto import front
from nereus_core.planner.space import Space, StageOptions
from nereus_core.workload import Stage


@dataclass(frozen=True, slots=True)
class Judged:
    """What SCIP found."""

    status: str
    """optimal, infeasible or timelimit."""
    seconds: float
    """The best step it found; inf where it found none."""
    bound_s: float
    """No plan is faster."""
    solving_s: float
    """Processor seconds of presolving and solving, without building the model."""
    num_variables: int


@dataclass(frozen=True, slots=True)
class _Way:
    """An option of a stage: what it crosses, and its row and rounds."""

    crossing: int
    row: int
    seconds: float
    stays: float
    runs: float
    num_devices: int


def _ways(options: StageOptions, capacity: float, shapes: Sequence[Shape]) -> list[_Way]:
    """Options that some span allows and that are undominated in one: SCIP gets no others."""
    kept = set()
    for shape in shapes:
        fits, crossing = options.grid.fitted(shape)
        rows = np.flatnonzero(fits)
        busy_s = options.busy_s[crossing[rows], rows]
        stays, runs = options.persistent_bytes[rows], options.transient_bytes[rows]
        at, wave = np.nonzero(stays[:, None] + runs <= capacity)
        columns = np.stack([busy_s[at, wave], stays[at], runs[at, wave]], axis=1)
        for i in front(columns):
            row = int(rows[at[i]])
            number = int(options.grid.num_devices[row])
            kept.add((int(crossing[row]), row, *map(float, columns[i]), number))
    return [_Way(*way) for way in sorted(kept)]


def solve(space: Space, limit_s: float) -> Judged:
    """Solve a planning problem on one thread within so many processor seconds."""
    model = Model()
    model.hideOutput()
    stages, slots = range(len(space.stages)), range(min(len(space.stages), space.num_devices))
    levels, total = range(space.num_levels), space.num_devices
    capacity = float(space.cost.capacity_bytes)
    # Where a slot starts: within a node where nodes are alike, else among all devices.
    period = space.node_sizes[0] if len(set(space.node_sizes)) == 1 else total + 1
    sizes = [int(z) for z in space.sizes]
    starts = range(min(period, total + 1))
    spans = [
        (z, a)
        for z, a in product(sizes, starts)
        if a + z <= total  # of every start that is the same within a node, the first one
    ]
    shape = {span: shape_between(space.node_sizes, span[1], span[0] + span[1]) for span in spans}
    shapes = sorted(set(shape.values()))
    ways = [_ways(o, capacity, shapes) for o in space.options]

    w = {(g, *span): model.addVar(vtype="B") for g in slots for span in spans}
    x = {
        (s, g, c): model.addVar(vtype="B")
        for s in stages
        for g in slots
        for c in range(len(ways[s]))
    }
    member = {(s, g): model.addVar(vtype="B") for s in stages for g in slots}
    level_s = [model.addVar(lb=0.0) for _ in levels]
    peak = [model.addVar(lb=0.0, ub=1.0) for _ in slots]  # as a part of the capacity

    # --- Spans: one per slot, one after another, the largest first, empty slots last. ---
    def of_size(g: int, least: int) -> object:
        return quicksum(w[g, z, a] for z, a in spans if z >= least)

    for g in slots:
        model.addCons(of_size(g, 0) <= 1)
    for a in starts:
        model.addCons(quicksum(w[0, z, b] for z, b in spans if b == a and a != 0) == 0)
    for g in slots[1:]:
        for a in starts:
            ends = quicksum(w[g - 1, z, b] for z, b in spans if (b + z) % period == a)
            model.addCons(quicksum(w[g, z, b] for z, b in spans if b == a) <= ends)
        for z in sizes:
            model.addCons(of_size(g, z) <= of_size(g - 1, z))
    model.addCons(quicksum(z * w[g, z, a] for g in slots for z, a in spans) <= total)

    # --- Every stage has one option in one slot that holds it. ---
    for s in stages:
        model.addCons(quicksum(member[s, g] for g in slots) == 1)
        for g in slots:
            chosen = [x[s, g, c] for c in range(len(ways[s]))]
            model.addCons(quicksum(chosen) == member[s, g])
            model.addCons(member[s, g] <= of_size(g, 0))
            for span in spans:
                fits, crossing = space.options[s].grid.fitted(shape[span])
                wrong = [
                    x[s, g, c]
                    for c, way in enumerate(ways[s])
                    if not (fits[way.row] and crossing[way.row] == way.crossing)
                ]
                model.addCons(quicksum(wrong) + w[g, span[0], span[1]] <= 1)
    for group in space.together:
        first, *others = sorted(group)
        for other, g in product(others, slots):
            model.addCons(member[first, g] == member[other, g])

    # --- Of slots of one size, the one with the earliest stage comes first. ---
    for g in slots:
        model.addCons(of_size(g, 0) <= quicksum(member[s, g] for s in stages))
    leads = {(g, s): model.addVar(vtype="B") for g in slots for s in stages}
    for g in slots:
        model.addCons(quicksum(leads[g, s] for s in stages) == of_size(g, 0))
        for s in stages:
            model.addCons(leads[g, s] <= member[s, g])
            for earlier in range(s):
                model.addCons(leads[g, s] + member[earlier, g] <= 1)
    for g in slots[1:]:
        alike = model.addVar(vtype="B")
        for z in sizes:
            both = quicksum(w[h, y, a] for h in (g - 1, g) for y, a in spans if y == z)
            model.addCons(both <= 1 + alike)
        before, after = (quicksum(s * leads[h, s] for s in stages) for h in (g - 1, g))
        model.addCons(before <= after + len(stages) * (1 - alike))

    # --- Memory, as parts of the capacity. ---
    for g in slots:
        for s in stages:
            runs = [x[s, g, c] * (way.runs / capacity) for c, way in enumerate(ways[s])]
            model.addCons(quicksum(runs) <= peak[g])
        stays = (
            x[s, g, c] * (way.stays / capacity) for s in stages for c, way in enumerate(ways[s])
        )
        model.addCons(quicksum(stays) + peak[g] <= 1)

    # --- Seconds. ---
    def busy(s: int, g: int) -> object:
        return quicksum(x[s, g, c] * way.seconds for c, way in enumerate(ways[s]))

    def bounds(seconds: object, of_level: Sequence[int]) -> None:
        for g in slots:
            model.addCons(quicksum(busy(s, g) for s in of_level) <= seconds)
        for s in of_level:
            model.addCons(quicksum(busy(s, g) for g in slots) <= seconds)
        device_s = (
            x[s, g, c] * (way.seconds * way.num_devices / total)
            for s in of_level
            for g in slots
            for c, way in enumerate(ways[s])
        )
        model.addCons(quicksum(device_s) <= seconds)

    for n in levels:
        bounds(level_s[n], [s for s in stages if space.options[s].level == n])
    if space.cost.job.workload.asynchronous:
        generating = {o.level for o in space.options if o.stage.stage is Stage.GENERATE}
        step = model.addVar(lb=0.0)
        model.addCons(quicksum(level_s[n] for n in levels if n not in generating) <= step)
        bounds(step, list(stages))
        model.setObjective(step)
    else:
        model.setObjective(quicksum(level_s))
    model.setParam("limits/time", limit_s)
    model.setParam("limits/gap", 0.0)
    model.setParam("parallel/maxnthreads", 1)
    model.setParam("timing/clocktype", 1)  # processor seconds
    model.optimize()
    found = model.getNSols() > 0
    return Judged(
        model.getStatus(),
        model.getObjVal() if found else np.inf,
        model.getDualbound(),
        model.getSolvingTime(),
        model.getNVars(transformed=False),
    )
