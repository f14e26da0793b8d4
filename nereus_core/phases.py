"""Phases: the five stretches of every primitive, in order, and what is told as each begins."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from nereus_core.primitives import Primitive


class Phase(StrEnum):
    """A stretch of a primitive. Until `COMMIT` has begun, nothing that is alive has changed."""

    PREPARE = "prepare"
    """Check, and reserve room for new shards beside the old ones."""
    TRANSFER = "transfer"
    """State flows into the new shards."""
    VERIFY = "verify"
    """What arrived is compared with what was sent."""
    COMMIT = "commit"
    """Units switch: those that end have ended, those that are made are alive."""
    RELEASE = "release"
    """The memory of what ended is freed; only the way forward is left."""

    @property
    def may_abort(self) -> bool:
        """Whether an error as the phase begins leaves everything as it was."""
        return self is not Phase.RELEASE


PhaseHook = Callable[[Primitive, Phase], None]
"""Told as each phase of a primitive begins, on the thread that performs it.

What it raises aborts the primitive, and units() stay as they were. As `Phase.RELEASE` begins it is
too late for that: the primitive is finished, keeps its receipt, and then the error is raised.
"""

Enter = Callable[[Phase], None]
"""How the code that performs a primitive says that a phase begins."""
