"""SCIP plans the same transition: which units each Extend reads, and when every primitive runs.

A mixed-integer program. Variables: a start per primitive, one binary per Extend and unit it may
read (one or more are read, at least as many as the compiled graph gives it), one binary per pair of
primitives that a device, taken, left or read, can bring into conflict, and the completion time,
which is least. Durations are those of the compiled graph, so both solve for the same seconds; the
pairs are what a device forbids to overlap.
"""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import combinations

from pyscipopt import Model, quicksum

from nereus_core.cost import CostModel
from nereus_core.primitives import Destroy, Extend, created, ended
from nereus_core.transition import EdgeKind, TransitionGraph
from nereus_core.units import Unit


def scip_s(graph: TransitionGraph, cost: CostModel, limit_s: float) -> tuple[float, str]:
    """CPU seconds that SCIP takes, model building included, and how it ended."""
    begin_s = time.process_time()
    model = Model()
    model.hideOutput()
    ops, number = graph.ops, {op.op_id: i for i, op in enumerate(graph.ops)}
    seconds = [graph.prices(cost)[op.op_id].mean_s for op in ops]
    horizon = sum(seconds)
    start = [model.addVar(lb=0.0, ub=horizon) for _ in ops]
    end = model.addVar(lb=0.0, ub=horizon)
    for i, own_s in enumerate(seconds):
        model.addCons(end >= start[i] + own_s)
    for edge in graph.edges:
        if edge.kind is EdgeKind.RELEASE:
            first, then = number[edge.before], number[edge.after]
            model.addCons(start[then] >= start[first] + seconds[first])
    maker = {u.id: i for i, op in enumerate(ops) for u in created(op)}
    ender = {op.unit: i for i, op in enumerate(ops) if isinstance(op, Destroy)}
    read: dict[tuple[int, object], object] = {}
    for i, op in enumerate(ops):
        for unit in ended(op):
            if unit in maker:
                model.addCons(start[i] >= start[maker[unit]] + seconds[maker[unit]])
        if not isinstance(op, Extend) or not op.sources:
            continue
        pool = _pool(graph, op)
        for unit in pool:
            use = read[i, unit.id] = model.addVar(vtype="B")
            if unit.id in maker:
                j = maker[unit.id]
                model.addCons(start[i] >= start[j] + seconds[j] - horizon * (1 - use))
            if unit.id in ender:
                j = ender[unit.id]
                if not ops[j].park:  # type: ignore[union-attr]  # enders are Destroys
                    model.addCons(start[j] >= start[i] + seconds[i] - horizon * (1 - use))
        model.addCons(quicksum(read[i, u.id] for u in pool) >= len(op.sources))
    _keep_apart(model, graph, start, seconds, read, horizon)
    model.setObjective(end, "minimize")
    model.setParam("timing/clocktype", 1)  # CPU seconds
    model.setParam("limits/time", limit_s)
    model.setParam("parallel/maxnthreads", 1)
    model.optimize()
    return time.process_time() - begin_s, model.getStatus()


def _pool(graph: TransitionGraph, op: Extend) -> list[Unit]:
    """Units that may be read: those of the stages that the compiled graph reads, but for itself."""
    stages = {u.model_stage for u in op.sources}
    new = {u.id for other in graph.ops if isinstance(other, Extend) for u in created(other)}
    return [u for u in graph.atlas.values() if u.model_stage in stages and u.id not in new]


def _keep_apart(model, graph, start, seconds, read, horizon) -> None:  # type: ignore[no-untyped-def]
    """Two primitives that use a device do not overlap; where one only may read, if it does."""
    always: dict[object, set[int]] = defaultdict(set)
    maybe: dict[object, set[int]] = defaultdict(set)
    uses = {}
    for i, op in enumerate(graph.ops):
        mine = {d for u in created(op) for d in u.devices}
        mine |= {d for u in ended(op) for d in graph.atlas[u].devices}
        for device in mine:
            always[device].add(i)
    for (i, unit), use in read.items():
        for device in graph.atlas[unit].devices:
            maybe[device].add(i)
            uses[i, device] = use
    groups = {
        (frozenset(always[d]), frozenset(maybe[d])): d for d in (always.keys() | maybe.keys())
    }
    order = {}
    for (fixed, readers), device in groups.items():
        for i, j in combinations(sorted(fixed | readers), 2):
            given = [uses[k, device] for k in (i, j) if k not in fixed and (k, device) in uses]
            if (i, j) not in order:
                order[i, j] = model.addVar(vtype="B")
            first = order[i, j]
            slack = horizon * (len(given) - quicksum(given))
            model.addCons(start[j] >= start[i] + seconds[i] - horizon * (1 - first) - slack)
            model.addCons(start[i] >= start[j] + seconds[j] - horizon * first - slack)
