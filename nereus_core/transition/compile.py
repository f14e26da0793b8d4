"""From running units to a target plan: the primitives, by model-stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nereus_core.cluster import Device
from nereus_core.errors import StateLost
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan, check_plan
from nereus_core.primitives import Kind
from nereus_core.transition.draft import Node
from nereus_core.transition.graph import TransitionGraph
from nereus_core.transition.matching import Held, Match, match
from nereus_core.transition.resources import ordered
from nereus_core.transition.roster import Place, Roster
from nereus_core.transition.sharing import shared
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
        StateLost: a stage has no unit left, follows no train stage that has one, and has no origin.
        Infeasible: state of the target does not fit on a device.
    """
    check_plan(target, job.on(job.cluster.without(lost)) if lost else job)
    alive, parked = units.intact(lost) if lost else units, parked or UnitMap()
    roster, matching = Roster(), _Matching(job, target, forbidden)
    drafted = []
    for number, stage in enumerate(job.workload.stages):
        there = roster.add(stage, alive.of(stage))
        serial = max(units.next_serial(stage), (serials or {}).get(stage, 0))
        found = matching.of(stage, roster, there)
        drafted.append(_StageDraft(number, stage, there, found, target[stage], roster, serial))
    pools = [_pool(draft, drafted, parked, roster, job) for draft in drafted]
    nodes = [n for d, pool in zip(drafted, pools, strict=True) for n in d.nodes(pool, roster)]
    standing, made = [d.there for d in drafted], [d.made for d in drafted]
    steps = ordered(nodes, pools, standing, made, roster, job, prefix)
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


class _StageDraft:
    """The primitives of one model-stage, and the units that hold its state, by number."""

    def __init__(
        self,
        number: int,
        stage: ModelStage,
        there: range,
        found: Match,
        target: Placement,
        roster: Roster,
        serial: int,
    ) -> None:
        """Number the units to be made, with serials from ``serial`` up, and draft the primitives.

        ``there`` are the units of the stage before.
        """
        self.stage, self.there, self._number = stage, there, number
        self._in_place: list[Node] = []
        stay = [there[i] for i in found.kept]
        places: list[Place] = []
        layouts: list[Layout] = []
        end = len(roster)
        for change in found.in_place:
            start, end = end, end + len(change.places)
            made = range(start, end)
            places += change.places
            layouts += [change.layout] * len(made)
            kind = Kind.SPLIT if change.is_split else Kind.MERGE
            parents = tuple(map(there.__getitem__, change.parents))
            self._in_place.append(Node(kind, number, parents, made))
            if change.bridge_to is not None:
                start, end = end, end + 1
                whole = range(start, end)
                places.append(change.bridge_to)
                layouts.append(target.layout)
                self._in_place.append(Node(Kind.MERGE, number, made, whole))
                made = whole
            stay += made
        self.new = range(end, end + len(found.new))
        places += found.new
        layouts += [target.layout] * len(found.new)
        self.made = roster.make(stage, serial, layouts, places)
        self._surplus = [there[i] for i in found.surplus]
        self.held = (*stay, *self._surplus)
        """Units that hold the state without an Extend: kept, made in place, surplus."""
        self.final = (*stay, *self.new)
        """Units of the target."""

    def nodes(self, pool: Sequence[int], roster: Roster) -> list[Node]:
        """Draft all primitives, given the units that an Extend may read; none: the origin."""
        reads: Sequence[Sequence[int]] = [()] * len(self.new)
        if pool:
            reads = shared(pool, self.new, roster.places)
        extends = [
            Node(Kind.EXTEND, self._number, made=(unit,), reads=sources)
            for unit, sources in zip(self.new, reads, strict=True)
        ]
        ends = [Node(Kind.DESTROY, self._number, (unit,)) for unit in self._surplus]
        return [*self._in_place, *extends, *ends]


def _pool(
    draft: _StageDraft, drafted: Sequence[_StageDraft], parked: UnitMap, roster: Roster, job: Job
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
        return roster.add(stage, own)
    node = job.workload.node(stage)
    train = next((d for d in drafted if d.stage == node.weights_from), None)
    if train is not None and (train.held or parked.of(train.stage)):
        return train.final
    if not node.origin:
        raise StateLost(node.weights_from or stage, None)
    return ()
