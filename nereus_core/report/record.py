"""RunRecord: the events of one run, put in order for reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from nereus_core.errors import ConfigError, NereusError
from nereus_core.events import (
    Decided,
    DevicesChanged,
    Event,
    InputIgnored,
    PrimitiveFinished,
    RunFinished,
    RunStarted,
    StepObserved,
    TransitionFinished,
    TransitionStarted,
    read_events,
)

PlanJson = Mapping[str, Any]


def last_run(path: Path) -> list[tuple[Event, float]]:
    """Return the events of the last run in a file, from its RunStarted on; [] if there is none."""
    events: list[tuple[Event, float]] = []
    for event, at_s in read_events(path):
        if isinstance(event, RunStarted):
            events = []
        if events or isinstance(event, RunStarted):
            events.append((event, at_s))
    return events


@dataclass(slots=True)
class TransitionRecord:
    """A transition: its graph, what of it ran, how it ended (None while it runs)."""

    started: TransitionStarted
    plan_before: PlanJson
    primitives: list[PrimitiveFinished] = field(default_factory=list)
    finished: TransitionFinished | None = None


@dataclass(slots=True)
class RunRecord:
    """One run. Steps are in order; a step done again after a failure counts once, the last time."""

    started: RunStarted
    steps: list[StepObserved] = field(default_factory=list)
    plans: list[PlanJson] = field(default_factory=list)
    """The plan each step ran under, one per entry of ``steps``."""
    decisions: list[Decided] = field(default_factory=list)
    transitions: list[TransitionRecord] = field(default_factory=list)
    story: list[Decided | TransitionRecord] = field(default_factory=list)
    """Decisions and transitions in the order in which they came."""
    device_changes: list[DevicesChanged] = field(default_factory=list)
    ignored: list[InputIgnored] = field(default_factory=list)
    """Measurements that made no sense and were left out."""
    finished: RunFinished | None = None
    last_at_s: float = 0.0

    @classmethod
    def of(cls, events: Iterable[tuple[Event, float]]) -> Self:
        """Read events; of a file with several runs, the last one. Raises NereusError if none."""
        record: Self | None = None
        plan: PlanJson = {}
        for event, at_s in events:
            if isinstance(event, RunStarted):
                record, plan = cls(event), event.plan
            elif record is not None:
                plan = record._add(event, plan)
            if record is not None:
                record.last_at_s = at_s
        if record is None:
            raise NereusError("the events hold no RunStarted; is this a file of `nereus run`?")
        return record

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read an event file; raises ConfigError when it cannot be opened."""
        try:
            return cls.of(read_events(path))
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error

    def _add(self, event: Event, plan: PlanJson) -> PlanJson:
        match event:
            case StepObserved():
                if self.steps and self.steps[-1].step == event.step:
                    self.steps.pop()
                    self.plans.pop()
                self.steps.append(event)
                self.plans.append(plan)
            case Decided():
                self.decisions.append(event)
                self.story.append(event)
            case TransitionStarted():
                self.transitions.append(TransitionRecord(event, plan))
                self.story.append(self.transitions[-1])
            case PrimitiveFinished():
                for transition in reversed(self.transitions):
                    if transition.started.transition == event.transition:
                        transition.primitives.append(event)
                        break
            case TransitionFinished():
                for transition in reversed(self.transitions):
                    if transition.started.transition == event.transition:
                        transition.finished = event
                        break
                return event.plan
            case DevicesChanged():
                self.device_changes.append(event)
            case InputIgnored():
                self.ignored.append(event)
            case RunFinished():
                self.finished = event
            case RunStarted():
                pass
        return plan

    @property
    def elapsed_s(self) -> float:
        """Wall seconds of the run so far."""
        return self.finished.elapsed_s if self.finished else self.last_at_s

    @property
    def transition_s(self) -> float:
        """Wall seconds spent in transitions."""
        return sum(t.finished.elapsed_s for t in self.transitions if t.finished)

    @property
    def mean_step_s(self) -> float | None:
        """Mean measured step latency."""
        if not self.steps:
            return None
        return sum(s.step_s for s in self.steps) / len(self.steps)

    def metric(self, word: str) -> str | None:
        """Name the metric that a word stands for: itself, else the shortest that contains it."""
        names = {name for s in self.steps for name in s.metrics if word in name}
        return word if word in names else min(names, key=lambda n: (len(n), n), default=None)

    def metrics(self, word: str) -> tuple[str, ...]:
        """Name all metrics that contain a word, sorted."""
        return tuple(sorted({name for s in self.steps for name in s.metrics if word in name}))
