"""Typed records of what was seen, decided and done, written as JSON lines.

The file is the job's memory for people and machines: ``nereus explain`` and the HTML report read
nothing else. Plans are written with `Plan.to_json`, everything else as plain values under the
field names below; ``event`` names the class and ``at_s`` is seconds since the run began.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from nereus_core.errors import NereusError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A job began under Nereus."""

    adapter: str
    algorithm: str
    mode: str
    plan: Json
    devices: tuple[str, ...]
    global_batch: int


@dataclass(frozen=True, slots=True)
class StepObserved:
    """One RL step, as measured and as predicted before it ran."""

    step: int
    step_s: float
    predicted_s: float | None
    stage_s: Mapping[str, float]
    response_tokens_mean: float
    response_tokens_p95: float
    prompt_tokens_mean: float
    peak_bytes: Mapping[str, int]
    healthy: tuple[str, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decided:
    """One decision of the controller, complete enough to be explained from this record alone."""

    step: int
    trigger: str
    """What woke the controller: a `nereus_core.triggers.Trigger`."""
    path: str
    """``urgent``, ``opportunistic`` or ``none`` (still within delta, no search)."""
    admitted: bool
    rule: str
    """The rule that fired, in words with values."""
    current_plan: Json
    candidate_plan: Json | None
    current_s: float | None
    """Predicted step latency of the current plan; None when it is infeasible."""
    candidate_s: float | None
    saving_s: float | None
    transition_s: float | None
    horizon_steps: float | None
    decision_s: float
    runner_ups: tuple[Json, ...] = ()
    """Plans that lost: {plan, predicted_s, bounds_s, reason}."""
    bounds_s: Json = field(default_factory=dict)
    """[low, high] of ``current``, ``candidate``, ``saving`` and ``transition``, where known."""
    signal: str = ""
    """The values that woke the controller, in words."""
    policy: str = "payback"
    """Which rule judged."""
    horizon_bounds: tuple[float, ...] = ()
    """Low and high of ``horizon_steps``."""
    horizon_signal: str = ""
    """What is expected to end the horizon: ``tokens``, ``devices``, ``end`` or ``none``."""


@dataclass(frozen=True, slots=True)
class TransitionStarted:
    """A transition graph began to execute: nodes and the reasons of its edges."""

    transition: str
    step: int
    ops: tuple[Json, ...]
    """{op_id, kind, text, stage, devices, predicted_s}."""
    edges: tuple[Json, ...]
    """{before, after, kind, reason}."""


@dataclass(frozen=True, slots=True)
class PrimitiveFinished:
    """One primitive, with its times on the transition's clock (seconds since it started)."""

    transition: str
    op_id: str
    kind: str
    text: str
    stage: str
    devices: tuple[str, ...]
    start_s: float
    end_s: float
    moved_bytes: int
    kept_bytes: int
    predicted_s: float | None
    error: str | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """When each phase that it entered began, by name, on the same clock."""


@dataclass(frozen=True, slots=True)
class TransitionFinished:
    """A transition ended: ``done``, ``rolled_back`` or ``failed``."""

    transition: str
    step: int
    outcome: str
    elapsed_s: float
    predicted_s: float | None
    moved_bytes: int
    plan: Json
    error: str | None = None
    epoch: int | None = None
    """Transitions committed with this one; None where it was not."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A controller found a transition that an earlier one had not ended."""

    step: int
    transition: str
    outcome: str
    """``resumed``, ``linked again``, ``old plan goes on`` or ``left as it stands``."""
    plan: Json


@dataclass(frozen=True, slots=True)
class DevicesChanged:
    """Devices left or came back."""

    step: int
    lost: tuple[str, ...]
    returned: tuple[str, ...]
    lost_units: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InputIgnored:
    """A part of an observation that made no sense was left out of all learning and deciding."""

    step: int
    field: str
    value: str
    reason: str
    count: int
    """So far in this run, this one included."""


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The job ended."""

    steps: int
    outcome: str
    elapsed_s: float
    transition_s: float


Event = (
    RunStarted
    | StepObserved
    | Decided
    | TransitionStarted
    | PrimitiveFinished
    | TransitionFinished
    | Recovered
    | DevicesChanged
    | InputIgnored
    | RunFinished
)
_KINDS: dict[str, type[Event]] = {
    c.__name__: c
    for c in (
        RunStarted,
        StepObserved,
        Decided,
        TransitionStarted,
        PrimitiveFinished,
        TransitionFinished,
        Recovered,
        DevicesChanged,
        InputIgnored,
        RunFinished,
    )
}

Listener = Callable[[Event, float], None]
"""Called with each event and its ``at_s``."""


class EventLog:
    """Appends events to a file, one JSON object a line, flushed; and tells listeners.

    Thread-safe. ``clock`` returns seconds; it is an argument because simulated runs bring theirs.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        self._clock, self._start_s = clock, clock()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def subscribe(self, listener: Listener) -> None:
        """Tell ``listener`` every event from now on."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Write one event."""
        with self._lock:
            at_s = self._clock() - self._start_s
            if self._file is not None:
                self._file.write(json.dumps(to_json(event, at_s), separators=(",", ":")) + "\n")
                self._file.flush()
            for listener in self._listeners:
                listener(event, at_s)

    def close(self) -> None:
        """Close the file; emitting afterwards only tells listeners."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def to_json(event: Event, at_s: float) -> dict[str, Any]:
    """Return an event as plain values."""
    return {"event": type(event).__name__, "at_s": round(at_s, 6), **dataclasses.asdict(event)}


def from_json(record: Mapping[str, Any]) -> tuple[Event, float]:
    """Read back what `to_json` wrote; raises NereusError naming what does not fit."""
    values = dict(record)
    kind, at_s = values.pop("event", None), values.pop("at_s", 0.0)
    if kind not in _KINDS:
        raise NereusError(f"unknown event kind {kind!r}; known: {', '.join(_KINDS)}.")
    known = {f.name for f in dataclasses.fields(_KINDS[kind])}
    # A newer writer may add fields: an older reader leaves them.
    picked = {
        key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in known
    }
    build: Callable[..., Event] = _KINDS[kind]
    try:
        return build(**picked), float(at_s)
    except TypeError as error:
        raise NereusError(f"event {kind} is incomplete: {error}.") from error


def read_events(path: Path) -> Iterator[tuple[Event, float]]:
    """Yield the events of a file with their ``at_s``; a last line cut short is left out."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise NereusError(f"{path}:{number} is not JSON: {error}.") from error
            yield from_json(record)
