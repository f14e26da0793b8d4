"""Execute a graph on an adapter: all of it, or the old plan again, or a named remainder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nereus_core.adapter import Adapter, Receipt
from nereus_core.cost import Interval
from nereus_core.errors import NereusError, SeatDead, TransitionFailed, UnitLost
from nereus_core.events import EventLog, TransitionFinished, TransitionStarted
from nereus_core.plan import Plan
from nereus_core.primitives import OpId, Primitive
from nereus_core.transition.compile import compile_transition
from nereus_core.transition.graph import PrimitiveCost, TransitionGraph
from nereus_core.transition.run import Conditions, Progress, run
from nereus_core.transition.verify import Baseline, check_units


@dataclass(frozen=True, slots=True)
class Outcome:
    """A transition that reached its plan."""

    transition: str
    receipts: Mapping[OpId, Receipt]
    elapsed_s: float
    predicted: Interval | None
    """Makespan as predicted; None where no cost model was given."""
    moved_bytes: int
    plan: Plan


def execute(
    graph: TransitionGraph,
    adapter: Adapter,
    *,
    log: EventLog,
    timeout_s: float,
    cost: PrimitiveCost | None = None,
    cancel: threading.Event | None = None,
    verify: bool = False,
    step: int = -1,
    clock: Callable[[], float] = time.monotonic,
    on_primitive: Callable[[Primitive, Receipt, float | None], None] | None = None,
) -> Outcome:
    """Execute inside an open boundary that holds ``graph.stages``.

    When a primitive fails, no other is launched, those that run are awaited, and the old plan is
    compiled from the units there are and executed, once. That is left out when units were lost,
    when a primitive has not returned, and when finished state proves wrong.

    Args:
        graph: What to do.
        adapter: On what.
        log: Told when the transition starts, when a primitive ends, and when the transition ends.
        timeout_s: Wall seconds for all primitives together; as many again for the old plan.
        cost: Prices primitives, for the record.
        cancel: Setting it has the effect of a failure.
        verify: Compare fingerprints of the units made with one of each stage before.
        step: Last completed RL step, for the record.
        clock: Gives the times recorded.
        on_primitive: Told of every primitive that completed, with the seconds predicted.

    Raises:
        TransitionFailed: its cause, what is intact or parked, and whether the old plan is back.
    """
    conditions = Conditions(log, timeout_s, cost, cancel, step, clock, on_primitive)
    try:
        baseline = Baseline.take(graph, adapter) if verify else None
    except NereusError as error:  # nothing has been touched
        raise TransitionFailed(
            "fingerprint", error, intact=tuple(graph.units_before), rolled_back=True
        ) from error
    return _execute(graph, adapter, conditions, baseline, may_undo=True)


def _execute(
    graph: TransitionGraph,
    adapter: Adapter,
    conditions: Conditions,
    baseline: Baseline | None,
    *,
    may_undo: bool,
) -> Outcome:
    start_s = conditions.clock()
    cost = conditions.cost
    predicted = None if cost is None else graph.predicted(cost)
    ops, edges = graph.to_json(cost)
    conditions.log.emit(TransitionStarted(graph.name, conditions.step, tuple(ops), tuple(edges)))
    progress = run(graph, adapter, conditions)
    if progress.cause is None:
        may_undo = False  # what follows is about state that is wrong already
        _verify(graph, adapter, baseline, progress)
    rolled_back = may_undo and _undo(graph, adapter, conditions, baseline, progress)
    units = adapter.units()
    elapsed_s, plan = conditions.clock() - start_s, Plan.of_units(units)
    cause = progress.cause
    conditions.log.emit(
        TransitionFinished(
            graph.name,
            conditions.step,
            "done" if cause is None else "rolled_back" if rolled_back else "failed",
            elapsed_s,
            None if predicted is None else predicted.mean_s,
            progress.moved_bytes,
            plan.to_json(),
            None if cause is None else f"{progress.failed}: {cause}",
        )
    )
    if cause is None:
        return Outcome(
            graph.name, progress.receipts, elapsed_s, predicted, progress.moved_bytes, plan
        )
    raise TransitionFailed(
        progress.failed,
        cause,
        done=tuple(progress.receipts),
        pending=tuple(op.op_id for op in graph.ops if op.op_id not in progress.receipts),
        intact=tuple(units),
        parked=() if rolled_back else tuple(graph.parked(progress.receipts).values()),
        rolled_back=rolled_back,
    ) from cause


def _verify(
    graph: TransitionGraph, adapter: Adapter, baseline: Baseline | None, progress: Progress
) -> None:
    """Record as a failure what the primitives, all of them done, left wrong."""
    try:
        check_units(adapter.units(), graph)
        if baseline is not None:
            baseline.check(graph, adapter)
    except NereusError as error:
        progress.failed, progress.cause = "verification", error


def _undo(
    graph: TransitionGraph,
    adapter: Adapter,
    conditions: Conditions,
    baseline: Baseline | None,
    progress: Progress,
) -> bool:
    """Bring the old plan back from the units there are; say whether that worked."""
    if progress.running or isinstance(progress.cause, UnitLost | SeatDead):
        return False
    units = adapter.units()
    if units == graph.units_before:
        return True
    try:
        back = compile_transition(
            units,
            Plan.of_units(graph.units_before),
            adapter.job(),
            prefix=f"{graph.name}-undo",
            parked=graph.parked(progress.receipts),
            serials=graph.next_serials(),
        )
        # A cancellation has had its effect.
        _execute(back, adapter, replace(conditions, cancel=None), baseline, may_undo=False)
    except NereusError:
        return False
    return True
