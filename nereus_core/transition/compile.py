"""From running units to a target plan: the primitives, by model-stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count

from nereus_core.cluster import Device
from nereus_core.errors import StateLost
from nereus_core.layout import Layout
from nereus_core.plan import Plan, check_plan
from nereus_core.primitives import Kind
from nereus_core.transition.draft import Node
from nereus_core.transition.graph import TransitionGraph
from nereus_core.transition.matching import Match, Place, match
from nereus_core.transition.resources import ordered
from nereus_core.transition.sharing import shared
from nereus_core.units import Unit, UnitId, UnitMap
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
    stages = job.workload.stages
    drafted = []
    for number, stage in enumerate(stages):
        found = match(
            job.model(stage),
            alive.of(stage),
            target[stage],
            splits=(Kind.SPLIT, stage.stage) not in forbidden,
            merges=(Kind.MERGE, stage.stage) not in forbidden,
        )
        serial = max(units.next_serial(stage), (serials or {}).get(stage, 0))
        drafted.append(_StageDraft(number, stage, found, target[stage].layout, serial))
    pools = [_pool(d, drafted, parked, job) for d in drafted]
    nodes = [node for d, pool in zip(drafted, pools, strict=True) for node in d.nodes(pool)]
    ops, edges = ordered(nodes, pools, alive, job, prefix)
    return TransitionGraph(prefix, alive, ops, edges, parked)


class _StageDraft:
    """The primitives of one model-stage, and the units that hold its state."""

    def __init__(
        self, number: int, stage: ModelStage, found: Match, layout: Layout, serial: int
    ) -> None:
        """Name the units to be made, from ``serial`` up, and draft the primitives."""
        self.stage, self._number, self._surplus = stage, number, found.surplus
        serials = count(serial)

        def unit(place: Place, layout: Layout) -> Unit:
            return Unit(UnitId(stage, next(serials)), layout, place)

        self._in_place: list[Node] = []
        stay = list(found.kept)
        for change in found.in_place:
            made = tuple(unit(place, change.layout) for place in change.places)
            kind = Kind.SPLIT if change.is_split else Kind.MERGE
            self._in_place.append(Node(kind, number, change.parents, made))
            if change.bridge_to is not None:
                whole = (unit(change.bridge_to, layout),)
                self._in_place.append(Node(Kind.MERGE, number, made, whole))
                made = whole
            stay += made
        self.new = [unit(place, layout) for place in found.new]
        self.held = (*stay, *found.surplus)
        """Units that hold the state without an Extend: kept, made in place, surplus."""
        self.final = (*stay, *self.new)
        """Units of the target."""

    def nodes(self, pool: Sequence[Unit]) -> list[Node]:
        """Draft all primitives, given the units that an Extend may read; none: the origin."""
        reads = shared(pool, self.new) if pool else [[] for _ in self.new]
        extends = [
            Node(Kind.EXTEND, self._number, made=(unit,), reads=sources)
            for unit, sources in zip(self.new, reads, strict=True)
        ]
        ends = [Node(Kind.DESTROY, self._number, (unit,)) for unit in self._surplus]
        return [*self._in_place, *extends, *ends]


def _pool(
    draft: _StageDraft, drafted: Sequence[_StageDraft], parked: UnitMap, job: Job
) -> tuple[Unit, ...]:
    """Units to extend a stage from: its own, else the final ones of the train stage it follows.

    The units of another stage are read when that stage has changed, so that nothing of it waits.
    Empty where nothing is extended, and where the origin serves.
    """
    stage = draft.stage
    if not draft.new:
        return ()
    if found := draft.held or parked.of(stage):
        return found
    node = job.workload.node(stage)
    train = next((d for d in drafted if d.stage == node.weights_from), None)
    if train is not None and (train.held or parked.of(train.stage)):
        return train.final
    if not node.origin:
        raise StateLost(node.weights_from or stage, None)
    return ()
