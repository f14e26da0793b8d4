"""A job that ended, and what Nereus left of it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from nereus_core.events import Event, read_events
from verl_cpu.command import Ran

COMPARED = 5
"""Steps of a job that are compared; one that is to fail does so after them."""


@dataclass(frozen=True)
class Job:
    """A job that ended, and what Nereus left."""

    ran: Ran
    work: Path

    @property
    def events(self) -> list[Event]:
        return [event for event, _ in read_events(self.work / "run" / "events.jsonl")]

    @property
    def outcome(self) -> str:
        """How Nereus says that it ended."""
        return self.events[-1].outcome

    @property
    def forced(self) -> list[dict]:
        """What was seen around each transition that the test asked for."""
        return [json.loads(line) for line in (self.work / "forced.jsonl").read_text().splitlines()]

    def series(self, metric: str, steps: int = COMPARED) -> list[float]:
        """The figures of the first steps."""
        found = [step[metric] for step in self.ran.metrics[:steps]]
        assert all(map(math.isfinite, found)), (metric, found)
        return found
