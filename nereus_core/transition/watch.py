"""Watch: what an executor hears of the phases of its primitives, and how it stops them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

from nereus_core.errors import Cancelled
from nereus_core.phases import Phase
from nereus_core.primitives import OpId, Primitive
from nereus_core.transition.journal import Journal


class Watch:
    """A `PhaseHook`: journals each phase before it begins, and lets no primitive of others commit.

    Args:
        transition: Its name, for errors.
        ops: The primitives that may run.
        journal: Told of each phase.
        clock: Seconds since the transition began.
        cancel: Once set, no primitive commits any more.
    """

    def __init__(
        self,
        transition: str,
        ops: Collection[OpId],
        journal: Journal,
        clock: Callable[[], float],
        cancel: threading.Event | None,
    ) -> None:
        self._transition, self._ops, self._journal = transition, ops, journal
        self._clock, self._cancel = clock, cancel
        self._lock, self._over = threading.Lock(), False
        self._begun: dict[OpId, dict[Phase, float]] = {}

    def __call__(self, op: Primitive, phase: Phase) -> None:
        """Hear that a phase begins; raises Cancelled where it must not."""
        with self._lock:
            stop = self._over or op.op_id not in self._ops
            if phase.may_abort and (stop or (self._cancel and self._cancel.is_set())):
                raise Cancelled(self._transition)
            if stop:
                return
            self._begun.setdefault(op.op_id, {})[phase] = self._clock()
        self._journal.enter(op.op_id, phase)

    def end(self) -> None:
        """Let no primitive enter another phase, up to its commit."""
        with self._lock:
            self._over = True

    def phases(self, op_id: OpId) -> Mapping[Phase, float]:
        """Return the phases that a primitive has entered, and when."""
        with self._lock:
            return dict(self._begun.get(op_id, {}))

    def committing(self, op_ids: Collection[OpId]) -> bool:
        """Whether one of these may have changed units already."""
        return any(Phase.COMMIT in self.phases(op_id) for op_id in op_ids)
