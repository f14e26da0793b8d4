"""How stage seconds add up to a step: levels of the algorithm's graph, and devices that are shared.

Stages of one level need nothing from one another: they run at once on disjoint devices and one
after another where they share any, so a level takes as long as its busiest device. Levels follow
one another. An asynchronous job generates while it trains: its period is the longer of the levels
without generation, and the busiest device over all stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from nereus_core.cluster import Device
from nereus_core.cost.interval import Interval
from nereus_core.cost.shapes import Options
from nereus_core.plan import Placement, Plan
from nereus_core.workload import ModelStage, Stage, Workload

Cell = frozenset[ModelStage]
"""Stages that meet on one device."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted seconds of a step under a plan, and what they consist of."""

    step: Interval
    stage_s: Mapping[ModelStage, float]
    sync_s: Mapping[ModelStage, float]
    """Per follower, the seconds in which it takes up new weights before it runs."""
    critical: tuple[ModelStage, ...]
    """Stages whose seconds the step's seconds are the sum of."""


def levels(workload: Workload) -> Mapping[ModelStage, int]:
    """Longest path from the start of a step to each model-stage."""
    found: dict[ModelStage, int] = {}
    for node in workload.nodes:  # in topological order
        found[node.model_stage] = max((found[s] + 1 for s in node.after), default=0)
    return found


def regions(plan: Plan) -> Mapping[Cell, frozenset[Device]]:
    """Cut the devices of a plan into regions on which the same stages meet."""
    found: dict[Cell, frozenset[Device]] = {}
    for stage, placement in plan.items():
        left, cut = placement.devices, dict[Cell, frozenset[Device]]()
        for cell, devices in found.items():
            shared = devices & left
            if shared:
                cut[cell | {stage}] = shared
                left, devices = left - shared, devices - shared
            if devices:
                cut[cell] = devices
        if left:
            cut[frozenset({stage})] = left
        found = cut
    return found


def makespan(
    workload: Workload, busy_s: Mapping[ModelStage, float], met: Collection[Cell]
) -> tuple[float, tuple[ModelStage, ...]]:
    """Seconds of a step, and the stages that they are the sum of.

    Args:
        workload: the algorithm's graph.
        busy_s: seconds each model-stage holds its devices.
        met: stages that share devices, from `regions`.
    """
    level = levels(workload)
    synchronous = [s for s in level if not (workload.asynchronous and s.stage is Stage.GENERATE)]
    total, critical = 0.0, list[ModelStage]()
    for number in sorted({level[s] for s in synchronous}):
        members = {s for s in synchronous if level[s] == number}
        seconds, stages = _busiest(busy_s, [cell & members for cell in met])
        total, critical = total + seconds, critical + stages
    if workload.asynchronous:
        seconds, stages = _busiest(busy_s, met)
        if seconds > total:
            total, critical = seconds, stages
    return total, tuple(critical)


def _busiest(
    busy_s: Mapping[ModelStage, float], met: Collection[Cell]
) -> tuple[float, list[ModelStage]]:
    sums = [(sum(busy_s[s] for s in sorted(cell)), sorted(cell)) for cell in met if cell]
    return max(sums, default=(0.0, list[ModelStage]()))


def options_of(placement: Placement) -> Options:
    """Read a placement as the one row of a table: degrees, and where groups cross nodes."""
    tp, pp = placement.layout.tp, placement.layout.pp
    column = [np.array([n]) for n in (tp, pp, placement.dp)]
    names = {d.node for unit in placement.units for d in unit}
    if len(names) == 1:
        return Options.within_node(*column)
    number = {name: i for i, name in enumerate(sorted(names))}
    nodes = np.array([[number[d.node] for d in unit] for unit in placement.units])
    grid = nodes.reshape(placement.dp, pp, tp)
    crosses = [(grid != grid.take([0], axis=axis)).any(keepdims=True) for axis in (2, 1, 0)]
    return Options(*column, *(c.reshape(1) for c in crosses))
