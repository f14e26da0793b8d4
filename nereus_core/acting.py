"""Act: hold the stages, carry a transition out, let the job go on; finish what others left."""

from __future__ import annotations

from collections.abc import Collection, Container

from nereus_core.adapter import Adapter
from nereus_core.config import TimeoutsConfig
from nereus_core.plan import Plan, plan_problems
from nereus_core.primitives import OpId, created, ended
from nereus_core.transition import (
    Conditions,
    Outcome,
    Pending,
    TransitionGraph,
    execute_under,
    transact,
)
from nereus_core.units import UnitMap
from nereus_core.workload import ModelStage


def carry_out(
    graph: TransitionGraph,
    adapter: Adapter,
    stages: Collection[ModelStage],
    conditions: Conditions,
    timeouts: TimeoutsConfig,
    *,
    verify: bool,
) -> tuple[Outcome, float]:
    """Carry a transition out; returns its outcome and the seconds the job was held.

    A graph without primitives links what is left after a loss.

    Raises:
        BoundaryTimeout: a stage did not become idle; nothing was touched.
        TransitionFailed: as `execute` raises it; where the old plan is back, it has been linked.
        UnitLost: a device went while the units were linked.
    """
    with adapter.boundary(stages, timeout_s=timeouts.boundary_s):
        begin_s = conditions.clock()
        outcome = execute_under(conditions, graph, adapter, verify=verify)
        return outcome, conditions.clock() - begin_s


def finish(
    pending: Pending, adapter: Adapter, conditions: Conditions, timeouts: TimeoutsConfig
) -> str:
    """Finish a transition that an earlier controller began and did not end; says how.

    Where nothing has changed, the old plan goes on. Where the units are those of the graph midway,
    the rest of it is run. Past the epoch switch there is only forward: the units are linked again.
    Units that are neither are left as they stand, for the controller to plan from.

    Raises:
        BoundaryTimeout, TransitionFailed, UnitLost: as `carry_out` does.
    """
    graph, journal, job = pending.graph, conditions.journal, adapter.job()
    with adapter.boundary(job.workload.stages, timeout_s=timeouts.boundary_s):
        units = adapter.units()
        done = standing(graph, units, pending.done)
        plan = Plan.of_units(units)
        sound = not plan_problems(plan, job)
        if pending.switched_to is not None:
            if sound:
                adapter.relink(plan)
            journal.end("done")
            return "linked again" if sound else "left as it stands"
        if done is None:
            journal.end("failed")
            return "left as it stands"
        if not done and sound and not pending.undoes:
            adapter.relink(plan)
            journal.end("rolled back")
            return "old plan goes on"
        transact(graph, adapter, conditions, pending.baseline, done=done, undoes=pending.undoes)
        return "rolled back" if pending.undoes else "resumed"


def standing(
    graph: TransitionGraph, units: UnitMap, recorded: Container[OpId]
) -> frozenset[OpId] | None:
    """Say which primitives have been done to make these units; None when no set of them does.

    A primitive may be done without a record of it: the units tell. Nothing was begun after it, so
    that what it made is all there.

    Args:
        graph: What was begun.
        units: What is alive.
        recorded: Primitives that are known to be done.
    """
    before, done = graph.predecessors(), set[OpId]()
    for op in graph.topological():
        made = all(units.get(unit.id) == unit for unit in created(op))
        told = before[op.op_id] <= done and made and units.keys().isdisjoint(ended(op))
        if op.op_id in recorded or told:
            done.add(op.op_id)
    return frozenset(done) if graph.units_after(done) == units else None
