"""From running units to a target plan: the primitives, by model-stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count

from nereus_core.cluster import Device
from nereus_core.errors import StateLost
from nereus_core.layout import Layout
from nereus_core.plan import Plan, check_plan
from nereus_core.primitives import Destroy, Extend, Kind, Merge, OpId, Primitive, Split
from nereus_core.transition.graph import TransitionGraph
from nereus_core.transition.matching import Match, match
from nereus_core.transition.resources import ordered
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage, Stage

_UNNAMED = OpId("")
"""Primitives are numbered once their order is known."""


@dataclass(frozen=True, slots=True)
class StageOps:
    """The primitives of one model-stage, and the units that hold its state."""

    ops: tuple[Primitive, ...]
    held: tuple[UnitId, ...]
    """Units that hold it without an Extend: kept, made by splits and merges, surplus."""
    final: tuple[UnitId, ...]
    """Units of the target."""


def compile_transition(
    units: UnitMap,
    target: Plan,
    job: Job,
    *,
    lost: frozenset[Device] = frozenset(),
    prefix: str,
    parked: UnitMap | None = None,
    serials: Mapping[ModelStage, int] | None = None,
    forbidden: Collection[tuple[Kind, Stage]] = (),
) -> TransitionGraph:
    """Build the graph that turns units into a plan.

    Units that are in their place are not touched. Splits and merges happen in place; missing units
    are extended from all units that hold the stage's state; surplus units are destroyed last,
    unless their devices are awaited (see `resources`). A stage that has no unit left is extended
    from the train stage it follows. Deterministic.

    Args:
        units: Units running now.
        target: What they should become.
        job: The job they run.
        lost: Failed devices; units that held one are gone.
        prefix: Name of the transition; its op ids are ``prefix/0`` ...
        parked: Units parked by an earlier transition that failed; used where a stage has no other.
        serials: Least serial of a new unit by model-stage, where serials above those of the units
            running have been used before.
        forbidden: Splits and merges that the adapter cannot do on a kind of stage; units are
            extended and destroyed instead.

    Raises:
        PlanError: the target breaks a rule on the devices that are left.
        StateLost: a stage has no unit left and follows no train stage that has one.
    """
    check_plan(target, job.on(job.cluster.without(lost)))
    alive, parked = units.intact(lost), parked or UnitMap()
    staged: dict[ModelStage, StageOps] = {}
    for stage in job.workload.stages:
        found = match(
            job.model(stage),
            alive.of(stage),
            target[stage],
            splits=(Kind.SPLIT, stage.stage) not in forbidden,
            merges=(Kind.MERGE, stage.stage) not in forbidden,
        )
        serial = max(units.next_serial(stage), (serials or {}).get(stage, 0))
        staged[stage] = _stage_ops(stage, found, target[stage].layout, serial)
    ops: list[Primitive] = []
    for stage, changes in staged.items():
        for op in changes.ops:
            if isinstance(op, Extend):
                op = Extend(_UNNAMED, _sources(stage, staged, parked, job), op.unit)
            ops.append(op)
    final, edges = ordered(ops, alive, parked, job.workload.stages, prefix)
    return TransitionGraph(prefix, alive, final, edges, parked)


def _stage_ops(stage: ModelStage, found: Match, layout: Layout, serial: int) -> StageOps:
    """Name the units to be made, from ``serial`` up, and write the primitives that make them."""
    serials = count(serial)

    def unit(place: tuple[Device, ...]) -> Unit:
        return Unit(UnitId(stage, next(serials)), layout, place)

    ops: list[Primitive] = []
    stay = [u.id for u in found.kept]
    for change in found.in_place:
        made = tuple(unit(place) for place in change.places)
        parents = tuple(u.id for u in change.parents)
        if change.is_split:
            ops.append(Split(_UNNAMED, parents[0], made))
        else:
            ops.append(Merge(_UNNAMED, parents, made[0]))
        stay += [u.id for u in made]
    new = [unit(place) for place in found.new]
    ops += [Extend(_UNNAMED, (), u) for u in new]
    ops += [Destroy(_UNNAMED, u.id) for u in found.surplus]
    held = (*stay, *(u.id for u in found.surplus))
    return StageOps(tuple(ops), held, (*stay, *(u.id for u in new)))


def _sources(
    stage: ModelStage, staged: Mapping[ModelStage, StageOps], parked: UnitMap, job: Job
) -> tuple[UnitId, ...]:
    """Units to extend a stage from: its own, else the final ones of the train stage it follows.

    The units of another stage are read when that stage has changed, so that nothing of it waits.
    """
    if found := staged[stage].held or tuple(u.id for u in parked.of(stage)):
        return found
    train = job.workload.node(stage).weights_from
    if train is None or not (staged[train].held or parked.of(train)):
        raise StateLost(train or stage, None)
    return staged[train].final
