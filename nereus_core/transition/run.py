"""Run the primitives of a graph: those that are ready at once, on disjoint devices only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from queue import Empty, SimpleQueue

from nereus_core.adapter import Adapter, Receipt
from nereus_core.cluster import Device
from nereus_core.errors import Cancelled, WaitTimeout
from nereus_core.events import EventLog, PrimitiveFinished
from nereus_core.primitives import (
    Destroy,
    Extend,
    Merge,
    OpId,
    Primitive,
    Split,
    kind_of,
    model_stage_of,
    touched,
)
from nereus_core.transition.graph import PrimitiveCost, TransitionGraph
from nereus_core.transition.journal import Journal
from nereus_core.transition.watch import Watch


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a run needs besides graph and adapter."""

    log: EventLog
    timeout_s: float
    """Wall seconds for all primitives together."""
    cost: PrimitiveCost | None = None
    cancel: threading.Event | None = None
    step: int = -1
    """Last completed RL step, for the events."""
    clock: Callable[[], float] = time.monotonic
    """Gives the times in events and outcomes; a simulated job brings its own."""
    on_primitive: Callable[[Primitive, Receipt, float | None], None] | None = None
    journal: Journal = field(default_factory=Journal)


@dataclass(slots=True)
class Progress:
    """How far a run came; ``failed`` and ``cause`` are None when it finished."""

    done: set[OpId] = field(default_factory=set)
    """Primitives that are done, those of an earlier run among them."""
    receipts: dict[OpId, Receipt] = field(default_factory=dict)
    failed: object | None = None
    cause: BaseException | None = None
    running: tuple[OpId, ...] = ()
    """Primitives that had not returned when the time was over; none of them commits any more."""
    uncertain: bool = False
    """Whether one of them may have committed: nothing is known of its units."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that crossed between devices."""
        return sum(r.moved_bytes for r in self.receipts.values())


@dataclass(frozen=True, slots=True)
class _Finished:
    op: Primitive
    start_s: float
    end_s: float
    result: Receipt | BaseException


def run(
    graph: TransitionGraph,
    adapter: Adapter,
    conditions: Conditions,
    done: Collection[OpId] = (),
) -> Progress:
    """Run until all is done or something fails; then launch no more and await what runs.

    Every primitive runs on a daemon thread of its own: one that hangs past the timeout is named in
    the error, commits no more, and does not keep the process from ending. What is no Exception,
    such as KeyboardInterrupt, is raised at once.

    Args:
        graph: What to run.
        adapter: On what.
        conditions: The rest.
        done: Primitives that an earlier run has done.
    """
    start_s = conditions.clock()

    def clock() -> float:
        return conditions.clock() - start_s

    watch = Watch(graph.name, graph.by_id.keys(), conditions.journal, clock, conditions.cancel)
    adapter.watch(watch)
    progress = Progress(set(done))
    try:
        _drain(graph, adapter, conditions, progress, watch, clock)
    except BaseException:
        watch.end()
        raise
    if progress.running:
        watch.end()  # and it stays: whoever wakes up hears that it is over
        progress.uncertain = watch.committing(progress.running)
    else:
        adapter.watch(None)
    return progress


def _drain(
    graph: TransitionGraph,
    adapter: Adapter,
    conditions: Conditions,
    progress: Progress,
    watch: Watch,
    clock: Callable[[], float],
) -> None:
    deadline_s = time.monotonic() + conditions.timeout_s
    sorter = TopologicalSorter(graph.predecessors())
    sorter.prepare()
    finished: SimpleQueue[_Finished] = SimpleQueue()
    ready: list[Primitive] = []
    running: dict[OpId, frozenset[Device]] = {}
    while sorter.is_active() or running:
        if conditions.cancel is not None and conditions.cancel.is_set() and not progress.cause:
            progress.failed, progress.cause = graph.name, Cancelled(graph.name)
        if progress.cause is None:
            ready += _ready(sorter, graph, progress)
            for op in _launchable(ready, graph, running):
                ready.remove(op)
                running[op.op_id] = touched(op, graph.atlas)
                _launch(op, adapter, clock, finished)
        if not running:
            break
        try:
            end = finished.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except Empty:
            names = ", ".join(f"{graph.by_id[op_id]}" for op_id in running)
            late = WaitTimeout(names, conditions.timeout_s)
            progress.failed, progress.cause = progress.failed or names, progress.cause or late
            progress.running = tuple(running)
            for op in (graph.by_id[op_id] for op_id in running):
                since_s = min(watch.phases(op.op_id).values(), default=clock())
                _report(_Finished(op, since_s, clock(), late), graph, conditions, watch)
            break
        del running[end.op.op_id]
        if isinstance(end.result, BaseException) and not isinstance(end.result, Exception):
            raise end.result
        if isinstance(end.result, BaseException):
            if progress.cause is None:
                progress.failed, progress.cause = end.op, end.result
        else:
            conditions.journal.done(end.op.op_id)
            progress.done.add(end.op.op_id)
            progress.receipts[end.op.op_id] = end.result
            sorter.done(end.op.op_id)
        _report(end, graph, conditions, watch)


def _ready(
    sorter: TopologicalSorter[OpId], graph: TransitionGraph, progress: Progress
) -> list[Primitive]:
    """Return the primitives that have become ready, past those that are done."""
    found: list[Primitive] = []
    while fresh := sorter.get_ready():
        for op_id in fresh:
            if op_id in progress.done:
                sorter.done(op_id)
            else:
                found.append(graph.by_id[op_id])
    return found


def _launchable(
    ready: list[Primitive], graph: TransitionGraph, running: dict[OpId, frozenset[Device]]
) -> list[Primitive]:
    """Pick ready primitives whose devices, senders included, are disjoint from all that run."""
    busy = set[Device]().union(*running.values())
    chosen = []
    for op in ready:
        devices = touched(op, graph.atlas)
        if busy.isdisjoint(devices):
            busy |= devices
            chosen.append(op)
    return chosen


def _launch(
    op: Primitive,
    adapter: Adapter,
    clock: Callable[[], float],
    finished: SimpleQueue[_Finished],
) -> None:
    def work() -> None:
        begin_s = clock()
        result: Receipt | BaseException
        try:
            result = _call(op, adapter)
        except BaseException as error:  # handed to the thread that waits, whatever it is
            result = error
        finished.put(_Finished(op, begin_s, clock(), result))

    threading.Thread(target=work, name=f"nereus {op.op_id}", daemon=True).start()


def _call(op: Primitive, adapter: Adapter) -> Receipt:
    match op:
        case Split():
            return adapter.split(op)
        case Merge():
            return adapter.merge(op)
        case Extend():
            return adapter.extend(op)
        case Destroy():
            return adapter.destroy(op)


def _report(end: _Finished, graph: TransitionGraph, conditions: Conditions, watch: Watch) -> None:
    op, result = end.op, end.result
    cost = conditions.cost
    predicted_s = None if cost is None else graph.prices(cost)[op.op_id].mean_s
    receipt = result if isinstance(result, Receipt) else None
    conditions.log.emit(
        PrimitiveFinished(
            transition=graph.name,
            op_id=op.op_id,
            kind=str(kind_of(op)),
            text=str(op),
            stage=str(model_stage_of(op)),
            devices=tuple(str(d) for d in sorted(touched(op, graph.atlas))),
            start_s=end.start_s,
            end_s=end.end_s,
            moved_bytes=receipt.moved_bytes if receipt else 0,
            kept_bytes=receipt.kept_bytes if receipt else 0,
            predicted_s=predicted_s,
            phases_s={str(phase): at_s for phase, at_s in watch.phases(op.op_id).items()},
            error=None if receipt else str(result),
        )
    )
    if receipt and conditions.on_primitive:
        conditions.on_primitive(op, receipt, predicted_s)
