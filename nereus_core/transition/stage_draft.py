"""The primitives of one model-stage, and the units that hold its state."""

from __future__ import annotations

from collections.abc import Sequence

from nereus_core.layout import Layout
from nereus_core.plan import Placement
from nereus_core.primitives import Kind
from nereus_core.transition.draft import Node
from nereus_core.transition.matched import Match
from nereus_core.transition.roster import Place, Roster
from nereus_core.transition.sharing import shared
from nereus_core.workload import ModelStage


class StageDraft:
    """What becomes of one model-stage; units by number."""

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
        """Number the units to be made, with serials from ``serial`` up, and draft what is in place.

        Args:
            number: Position of the model-stage in stage order.
            stage: The model-stage.
            there: Its units before.
            found: What becomes of them, and of the places of the target.
            target: What the stage shall be.
            roster: Of all units.
            serial: The least that is free.
        """
        self.stage, self.there, self._number = stage, there, number
        self._in_place: list[Node] = []
        self.layouts_before = roster.layouts[there.start : there.stop]
        stay = [there[i] for i in found.kept]
        places: list[Place] = []
        between: list[tuple[int, Layout]] = []
        """Positions among places of units that only lead to those of the target."""
        split, merge = Kind.SPLIT, Kind.MERGE
        own, end = there.start, len(roster)
        for change in found.in_place:
            start, end = end, end + len(change.places)
            made = range(start, end)
            places += change.places
            if change.is_split:
                kind, parents = split, [own + change.parents[0]]
            else:
                kind, parents = merge, [own + i for i in change.parents]
            self._in_place.append(Node(kind, number, parents, made, change.left, change.taken))
            if change.bridge_to is not None:
                between.append((len(places) - 1, change.layout))
                start, end = end, end + 1
                whole = range(start, end)
                places.append(change.bridge_to)
                self._in_place.append(
                    Node(merge, number, made, whole, change.taken, change.bridge_to)
                )
                made = whole
            stay += made
        self.new = range(end, end + len(found.new))
        places += found.new
        layouts = [target.layout] * len(places)
        for i, layout in between:
            layouts[i] = layout
        self.layouts_made = {*dict(between).values(), *([target.layout] if places else ())}
        roster.make(stage, serial, layouts, places)
        self._surplus = [there[i] for i in found.surplus]
        self.held = (*stay, *self._surplus)
        """Units that hold the state without an Extend: kept, made in place, surplus."""
        self.final = (*stay, *self.new)
        """Units of the target."""

    def nodes(self, pool: Sequence[int], roster: Roster) -> list[Node]:
        """Draft all primitives, given the units that an Extend may read; none: the origin."""
        number, places = self._number, roster.places
        reads: Sequence[Sequence[int]] = [()] * len(self.new)
        if pool:
            reads = shared(pool, self.new, places)
        extends = [
            Node(Kind.EXTEND, number, (), (unit,), (), places[unit], sources)
            for unit, sources in zip(self.new, reads, strict=True)
        ]
        ends = [Node(Kind.DESTROY, number, (u,), (), places[u], ()) for u in self._surplus]
        return [*self._in_place, *extends, *ends]
