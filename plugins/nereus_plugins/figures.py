"""Figures: what happened at a boundary as ``nereus/*`` numbers for the job's own loggers."""

from __future__ import annotations

from nereus_core.events import Decided, Event, TransitionFinished
from nereus_core.plan import Plan


class Figures:
    """Listens to the events of one run and adds up what each boundary brought."""

    def __init__(self) -> None:
        self._decisions = self._admitted = self._transitions = self._failed = 0
        self._moved_bytes = 0
        self._saving_s: float | None = None

    def take(self, event: Event, at_s: float) -> None:
        """See one event; an `EventLog` listener."""
        if isinstance(event, Decided):
            self._decisions += 1
            self._admitted += event.admitted
            self._saving_s = event.saving_s
        elif isinstance(event, TransitionFinished):
            self._transitions += event.outcome == "done"
            self._failed += event.outcome != "done"
            self._moved_bytes += event.moved_bytes

    def drained(
        self, plan: Plan, predicted_s: float, held_s: float, amid_s: float
    ) -> dict[str, float]:
        """Return the figures of this boundary; counts are of the whole run so far.

        Args:
            plan: In force now.
            predicted_s: Of the next step.
            held_s: Wall seconds that this boundary took.
            amid_s: And those in the middle of the step before it: a batch that would not have fit
                in memory, a node that was lost.
        """
        found = {
            "nereus/predicted_step_s": predicted_s,
            "nereus/boundary_s": held_s,
            "nereus/amid_step_s": amid_s,
            "nereus/decisions": float(self._decisions),
            "nereus/admitted": float(self._admitted),
            "nereus/transitions": float(self._transitions),
            "nereus/transitions_failed": float(self._failed),
            "nereus/moved_bytes": float(self._moved_bytes),
        }
        if self._saving_s is not None:
            found["nereus/predicted_saving_s"] = self._saving_s
            self._saving_s = None
        for stage, placement in plan.items():
            name = f"nereus/{stage.model}_{stage.stage}"
            found[f"{name}/units"] = float(placement.dp)
            found[f"{name}/devices_per_unit"] = float(placement.layout.num_devices)
        return found
