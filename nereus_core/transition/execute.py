"""Execute a graph on an adapter: all of it, or the old plan again, or a named remainder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from nereus_core.adapter import Adapter, Receipt
from nereus_core.cost import Interval
from nereus_core.errors import NereusError, SeatDead, TransitionFailed, UnitLost
from nereus_core.events import EventLog, TransitionFinished, TransitionStarted
from nereus_core.plan import Plan, plan_problems
from nereus_core.primitives import OpId, Primitive
from nereus_core.transition.compile import compile_transition
from nereus_core.transition.graph import PrimitiveCost, TransitionGraph
from nereus_core.transition.journal import Journal
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
    epoch: int
    """Transitions committed so far, this one among them."""


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
    journal: Journal | None = None,
) -> Outcome:
    """Execute inside an open boundary that holds ``graph.stages``, and switch the job over.

    When a primitive fails, no other is launched, those that run are awaited, and the old plan is
    compiled from the units there are and executed, once. That is left out when units were lost,
    when a primitive that has not returned may have committed, and when finished state proves wrong.

    Args:
        graph: What to do.
        adapter: On what.
        log: Told when the transition starts, when a primitive ends, and when the transition ends.
        timeout_s: Wall seconds for all primitives together; as many again for the old plan.
        cost: Prices primitives, for the record.
        cancel: Setting it has the effect of a failure; what has not committed then, does not.
        verify: Compare fingerprints of the units made with one of each stage before.
        step: Last completed RL step, for the record.
        clock: Gives the times recorded.
        on_primitive: Told of every primitive that completed, with the seconds predicted.
        journal: Told of everything before it happens.

    Raises:
        TransitionFailed: its cause, what is intact or parked, and whether the old plan is back.
        UnitLost: a device went in the epoch switch, when there was no way back.
    """
    conditions = Conditions(
        log, timeout_s, cost, cancel, step, clock, on_primitive, journal or Journal()
    )
    return execute_under(conditions, graph, adapter, verify=verify)


def execute_under(
    conditions: Conditions, graph: TransitionGraph, adapter: Adapter, *, verify: bool
) -> Outcome:
    """Execute with the conditions in one value; all else is as in `execute`."""
    try:
        baseline = Baseline.take(graph, adapter) if verify else None
    except NereusError as error:  # nothing has been touched
        raise TransitionFailed(
            "fingerprint", error, intact=tuple(graph.units_before), rolled_back=True
        ) from error
    conditions.journal.begin(graph, baseline)
    return transact(graph, adapter, conditions, baseline)


def transact(
    graph: TransitionGraph,
    adapter: Adapter,
    conditions: Conditions,
    baseline: Baseline | None,
    *,
    done: Collection[OpId] = (),
    undoes: bool = False,
) -> Outcome:
    """Run a transition that the journal knows: what of it is not done, then the epoch switch.

    Args:
        graph: What was begun.
        adapter: On what.
        conditions: Journal, log and limits.
        baseline: Fingerprints from before.
        done: Primitives that an earlier run has done.
        undoes: Whether it leads back to the plan before, so that there is no way back from it.

    Raises:
        TransitionFailed, UnitLost: as `execute` does.
    """
    start_s = conditions.clock()
    cost, journal = conditions.cost, conditions.journal
    predicted = None if cost is None else graph.predicted(cost)
    ops, edges = graph.to_json(cost)
    conditions.log.emit(TransitionStarted(graph.name, conditions.step, tuple(ops), tuple(edges)))
    progress = run(graph, adapter, conditions, done)
    rolled_back = False
    if progress.cause is None:
        _verify(graph, adapter, baseline, progress)  # there is no way back from wrong state
    elif not undoes:
        rolled_back = _undo(graph, adapter, conditions, baseline, progress)
    units, cause, epoch = adapter.units(), progress.cause, None
    plan = Plan.of_units(units)
    if cause is None:
        epoch = journal.epoch if undoes else journal.switching(plan)
        try:
            adapter.relink(plan)
            journal.end("rolled back" if undoes else "done")
        except TransitionFailed as failure:
            if undoes:
                raise
            # An adapter whose switch is a transaction of its own says how that ended: the job
            # steps on what it stepped on before, or cannot step.
            progress.failed, cause, epoch = failure.failed, failure.cause, None
            rolled_back, units = failure.rolled_back, adapter.units()
            plan = Plan.of_units(units)
            journal.end("rolled back" if rolled_back else "failed")
    elif not undoes:
        journal.end("rolled back" if rolled_back else "failed")
    elapsed_s = conditions.clock() - start_s
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
            None if undoes else epoch,
        )
    )
    if cause is None:
        return Outcome(
            graph.name,
            progress.receipts,
            elapsed_s,
            predicted,
            progress.moved_bytes,
            plan,
            journal.epoch,
        )
    raise TransitionFailed(
        progress.failed,
        cause,
        done=tuple(op.op_id for op in graph.ops if op.op_id in progress.done),
        pending=tuple(op.op_id for op in graph.ops if op.op_id not in progress.done),
        intact=tuple(units),
        parked=() if rolled_back else tuple(graph.parked(progress.done).values()),
        rolled_back=rolled_back,
    ) from cause


def _verify(
    graph: TransitionGraph, adapter: Adapter, baseline: Baseline | None, progress: Progress
) -> None:
    """Record as a failure what the primitives, all of them done, left wrong."""
    try:
        check_units(adapter.units(), graph, adapter.job().cluster.failed)
        if baseline is not None:
            baseline.check(graph, adapter)
    except (UnitLost, SeatDead) as error:
        progress.failed, progress.cause = graph.name, error
    except NereusError as error:
        progress.failed, progress.cause = "verification", error


def _undo(
    graph: TransitionGraph,
    adapter: Adapter,
    conditions: Conditions,
    baseline: Baseline | None,
    progress: Progress,
) -> bool:
    """Bring the old plan back from the units there are, and link it; say whether that worked."""
    if progress.uncertain or isinstance(progress.cause, UnitLost | SeatDead):
        return False
    units, before, job = adapter.units(), Plan.of_units(graph.units_before), adapter.job()
    try:
        if units == graph.units_before:
            if not plan_problems(before, job):
                adapter.relink(before)
            return True
        back = compile_transition(
            units,
            before,
            job,
            prefix=f"{graph.name}-undo",
            parked=graph.parked(progress.done),
            serials=graph.next_serials(),
        )
        conditions.journal.begin(back, baseline, undoes=True)
        # A cancellation has had its effect.
        transact(back, adapter, replace(conditions, cancel=None), baseline, undoes=True)
    except NereusError:
        return False
    return True
