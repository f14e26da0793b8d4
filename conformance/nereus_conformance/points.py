"""Where a fault strikes a transition: phases of primitives, and moments of the whole."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from nereus_core.harness import Fault
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.primitives import OpId
from nereus_core.transition import Journal, TransitionGraph
from nereus_core.transition.verify import Baseline

KILL_CONTROLLER, CANCEL = "kill the controller", "cancel"
FAULTS: tuple[str, ...] = (*Fault, KILL_CONTROLLER, CANCEL)
OF_CONTROLLER = (KILL_CONTROLLER, CANCEL)
"""Faults that strike the controller; all others strike a device."""


class Moment(StrEnum):
    """Of a transition as a whole: what the journal says between the phases of primitives."""

    BEGUN = "begun"
    """No primitive has started."""
    SWITCHING = "switching"
    """All are done; the job is linked to the new plan next."""
    ENDED = "ended"


Point = Phase | Moment
POINTS: tuple[Point, ...] = (Moment.BEGUN, *Phase, Moment.SWITCHING, Moment.ENDED)
"""In the order in which a transition of one primitive comes to them."""
MOMENTS_SHARE = len(Moment) / len(POINTS)
"""Of the faults of a controller, how many strike at a moment: each point with equal odds."""


class ControllerKilled(BaseException):
    """The controller's process is gone: nothing that is an Exception is caught by anybody."""


class Tripwire(Journal):
    """A journal that does something once a moment, or a phase of the n-th primitive, is on disk."""

    def __init__(self, path: Path, op_index: int, point: Point, then: Callable[[], None]) -> None:
        super().__init__(path)
        self._order: list[OpId] = []
        self._at: tuple[int, Point] | None = (op_index, point)
        self._then = then

    def begin(
        self, graph: TransitionGraph, baseline: Baseline | None, *, undoes: bool = False
    ) -> None:
        """Announce a transition."""
        super().begin(graph, baseline, undoes=undoes)
        self._pass(Moment.BEGUN)

    def enter(self, op_id: OpId, phase: Phase) -> None:
        """Announce a phase."""
        super().enter(op_id, phase)
        if op_id not in self._order:
            self._order.append(op_id)
        self._pass(phase, self._order.index(op_id))

    def switching(self, plan: Plan) -> int:
        """Announce the epoch switch."""
        epoch = super().switching(plan)
        self._pass(Moment.SWITCHING)
        return epoch

    def end(self, outcome: str) -> None:
        """Record the end."""
        super().end(outcome)
        self._pass(Moment.ENDED)

    def _pass(self, point: Point, op_index: int | None = None) -> None:
        if self._at is not None and point == self._at[1] and op_index in (None, self._at[0]):
            self._at = None
            self._then()
