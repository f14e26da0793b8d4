"""From running units to a target plan: the primitives, by model-stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nereus_core.cluster import Device
from nereus_core.errors import StateLost
from nereus_core.plan import Plan, check_plan
from nereus_core.primitives import Kind
from nereus_core.transition.graph import TransitionGraph
from nereus_core.transition.matched import Held, Match
from nereus_core.transition.matching import match
from nereus_core.transition.resources import ordered
from nereus_core.transition.room import is_ample
from nereus_core.transition.roster import Roster
from nereus_core.transition.stage_draft import StageDraft
from nereus_core.units import UnitMap
from nereus_core.workload import Job, ModelStage, Stage


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
    from the train stage it follows, or from its origin. On no device do new shards exceed the
    capacity beside what is there: others go first, or state waits in host memory. Deterministic.

    All is decided when this returns: which primitives, on which units, in an order that keeps every
    edge. Primitives and edges are wrapped as values, and reasons spelled, when they are first read.

    Args:
        units: Units running now, of stages of the job.
        target: What they should become.
        job: The job they run.
        lost: Failed devices; units that held one are gone.
        prefix: Name of the transition; its op ids are ``prefix/0`` ...
        parked: Units parked by an earlier transition that failed; used where a stage has no other.
        serials: Least serial of a new unit by model-stage, where serials above those of the units
            running and parked have been used before.
        forbidden: Splits and merges that the adapter cannot do on a kind of stage; units are
            extended and destroyed instead.

    Raises:
        PlanError: the target breaks a rule on the devices that are left.
        StateLost: a stage has no unit left, follows no train stage that has one, and has no origin.
        Infeasible: state of the target does not fit on a device.
    """
    check_plan(target, job.on(job.cluster.without(lost)) if lost else job)
    alive, parked = units.intact(lost) if lost else units, parked or UnitMap()
    roster, matching = Roster(), _Matching(job, target, forbidden)
    drafted = []
    for number, stage in enumerate(job.workload.stages):
        there = roster.add(alive.of(stage))
        used = max(units.next_serial(stage), parked.next_serial(stage))
        serial = max(used, (serials or {}).get(stage, 0))
        found = matching.of(stage, roster, there)
        drafted.append(StageDraft(number, stage, there, found, target[stage], roster, serial))
    pools = [_pool(draft, drafted, parked, roster, job) for draft in drafted]
    nodes = [n for d, pool in zip(drafted, pools, strict=True) for n in d.nodes(pool, roster)]
    before, made = [d.layouts_before for d in drafted], [d.layouts_made for d in drafted]
    tight = not is_ample(job, before, made)
    steps = ordered(nodes, pools, [d.there for d in drafted], roster, job, prefix, tight=tight)
    return TransitionGraph(prefix, alive, steps, parked)


class _Matching:
    """Matches model-stages to a target; those that lie and go alike, as colocated ones do, once."""

    def __init__(self, job: Job, target: Plan, forbidden: Collection[tuple[Kind, Stage]]) -> None:
        self._job, self._target, self._forbidden = job, target, forbidden
        self._found: list[tuple[object, Match]] = []

    def of(self, stage: ModelStage, roster: Roster, units: range) -> Match:
        """Match the units of a stage."""
        own = slice(units.start, units.stop)
        held = Held(roster.layouts[own], roster.places[own])
        model, placement = self._job.model(stage), self._target[stage]
        splits = (Kind.SPLIT, stage.stage) not in self._forbidden
        merges = (Kind.MERGE, stage.stage) not in self._forbidden
        alike = (splits, merges, model, placement, held)
        for before, found in self._found:
            if before == alike:
                return found
        found = match(model, held, placement, splits=splits, merges=merges)
        self._found.append((alike, found))
        return found


def _pool(
    draft: StageDraft, drafted: Sequence[StageDraft], parked: UnitMap, roster: Roster, job: Job
) -> Sequence[int]:
    """Units to extend a stage from: its own, else the final ones of the train stage it follows.

    The units of another stage are read when that stage has changed, so that nothing of it waits.
    Empty where nothing is extended, and where the origin serves.
    """
    stage = draft.stage
    if not draft.new:
        return ()
    if draft.held:
        return draft.held
    if own := parked.of(stage):
        return roster.add(own)
    node = job.workload.node(stage)
    train = next((d for d in drafted if d.stage == node.weights_from), None)
    if train is not None and (train.held or parked.of(train.stage)):
        return train.final
    if not node.origin:
        raise StateLost(node.weights_from or stage, None)
    return ()
