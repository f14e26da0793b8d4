"""The loop of ``nereus run``: step, boundary, until the job has finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nereus_core.errors import SeatDead, UnitLost
from nereus_core.launched import Launched

MAX_LOSSES_IN_A_ROW = 3
"""Failed attempts at one step before the run gives up; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What the loop did."""

    steps: int
    losses: int
    """Steps that lost a device and were asked for again."""


def drive(
    launched: Launched, at_boundary: Callable[[], object], *, max_steps: int | None = None
) -> Ran:
    """Run a job to its end, or ``max_steps`` steps of it, with one boundary after every step.

    A step that loses a device (SeatDead, UnitLost) is followed by a boundary too, in which the
    controller replans from what is intact; then the step is asked for again, at most
    MAX_LOSSES_IN_A_ROW times without a step done in between.

    Raises:
        SeatDead, UnitLost: the same step failed too often; the last failure.
        NereusError: whatever else a step or the controller raises.
    """
    steps = losses = in_a_row = 0
    while not launched.finished and (max_steps is None or steps < max_steps):
        try:
            launched.step()
        except (SeatDead, UnitLost):
            losses, in_a_row = losses + 1, in_a_row + 1
            if in_a_row > MAX_LOSSES_IN_A_ROW:
                raise
        else:
            steps, in_a_row = steps + 1, 0
        at_boundary()
    return Ran(steps, losses)
