"""The loop of ``nereus run``: step, boundary, until the job has finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nereus_core.checkpoints import Checkpoints
from nereus_core.errors import SeatDead, StateLost, UnitLost
from nereus_core.launched import Launched, Saves

MAX_LOSSES_IN_A_ROW = 3
"""Failed attempts at one step before the run gives up; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What the loop did."""

    steps: int
    losses: int
    """Steps that lost a device and were asked for again."""


def drive(
    launched: Launched,
    at_boundary: Callable[[], object],
    *,
    max_steps: int | None = None,
    checkpoints: Checkpoints | None = None,
) -> Ran:
    """Run a job to its end, or ``max_steps`` steps of it, with one boundary after every step.

    A step that loses a device (SeatDead, UnitLost) is followed by a boundary too, in which the
    controller replans from what is intact; then the step is asked for again, at most
    MAX_LOSSES_IN_A_ROW times without a step done in between. A checkpoint that is due is written
    before the boundary, so that a transition that loses the last copy loses no step; when a device
    is lost meanwhile, after the boundary.

    Raises:
        SeatDead, UnitLost: the same step failed too often; the last failure.
        StateLost: no copy of a state is left; names the newest checkpoint and how to resume.
        NereusError: whatever else a step, a checkpoint or the controller raises.
    """
    steps = losses = in_a_row = 0
    while not launched.finished and (max_steps is None or steps < max_steps):
        stepped = False
        try:
            launched.step()
        except (SeatDead, UnitLost):
            losses, in_a_row = losses + 1, in_a_row + 1
            if in_a_row > MAX_LOSSES_IN_A_ROW:
                raise
        else:
            steps, in_a_row, stepped = steps + 1, 0, True
        owed = stepped and checkpoints is not None and not _saved(launched, checkpoints)
        try:
            at_boundary()
        except StateLost as lost:
            raise (checkpoints.named(lost) if checkpoints else lost) from lost
        if owed and checkpoints is not None:
            _saved(launched, checkpoints)  # when it fails again, the next step's is due
    return Ran(steps, losses)


def _saved(launched: Launched, checkpoints: Checkpoints) -> bool:
    """Write the checkpoint that is due, if one is; False when a device was lost meanwhile."""
    if checkpoints.due(launched):
        assert isinstance(launched, Saves)
        try:
            checkpoints.save(launched)
        except (SeatDead, UnitLost):
            return False
    return True
