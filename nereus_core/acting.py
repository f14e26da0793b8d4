"""Act: hold the stages, execute the graph, link what is there now, let the job go on."""

from __future__ import annotations

from collections.abc import Callable, Collection

from nereus_core.adapter import Adapter, Receipt
from nereus_core.config import TimeoutsConfig
from nereus_core.cost import CostModel
from nereus_core.errors import TransitionFailed
from nereus_core.events import EventLog
from nereus_core.plan import Plan, plan_problems
from nereus_core.primitives import Primitive
from nereus_core.transition import Outcome, TransitionGraph, execute
from nereus_core.workload import ModelStage


def carry_out(
    graph: TransitionGraph,
    adapter: Adapter,
    stages: Collection[ModelStage],
    *,
    log: EventLog,
    timeouts: TimeoutsConfig,
    cost: CostModel,
    verify: bool,
    step: int,
    clock: Callable[[], float],
    on_primitive: Callable[[Primitive, Receipt, float | None], None],
) -> tuple[Outcome, float]:
    """Carry a transition out; returns its outcome and the seconds the job was held.

    A graph without primitives links what is left after a loss.

    Raises:
        BoundaryTimeout: a stage did not become idle; nothing was touched.
        TransitionFailed: as `execute` raises it; where the old plan is back, it has been linked.
        UnitLost: a device went while the units were linked.
    """
    with adapter.boundary(stages, timeout_s=timeouts.boundary_s):
        begin_s = clock()
        try:
            outcome = execute(
                graph,
                adapter,
                log=log,
                timeout_s=timeouts.primitive_s * max(1, graph.depth),
                cost=cost,
                verify=verify,
                step=step,
                clock=clock,
                on_primitive=on_primitive,
            )
        except TransitionFailed as failure:
            plan = Plan.of_units(adapter.units())
            if failure.rolled_back and not plan_problems(plan, adapter.job()):
                adapter.relink(plan)
            raise
        adapter.relink(outcome.plan)
        return outcome, clock() - begin_s
