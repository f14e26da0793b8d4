"""The live view of a run: a table on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

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
)
from nereus_core.report.quantities import changes, degrees, number, plan_line, seconds

_ROWS = 16
"""Steps kept in view; chosen, not measured."""
_NARROW = 112
"""Columns of a terminal below which plans share the room that is left; chosen, not measured."""


class View(Protocol):
    """Shows events as they happen; a context manager and an event listener."""

    def __call__(self, event: Event, at_s: float) -> None:
        """Show one event."""
        ...

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was."""
        ...


def view_on(console: Console) -> View:
    """Choose the view that suits a console."""
    return LiveTable(console) if console.is_terminal else PlainLines(console)


def reward_of(event: StepObserved) -> float | None:
    """Pick the reward among a step's metrics: the shortest name that contains the word."""
    names = [n for n in event.metrics if "reward" in n]
    return event.metrics[min(names, key=lambda n: (len(n), n))] if names else None


@dataclass(slots=True)
class _Line:
    step: StepObserved
    plan: str
    notes: list[str]


class LiveTable:
    """The last steps, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._lines: deque[_Line] = deque(maxlen=_ROWS)
        self._plan, self._title = "", "Nereus"

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.update(self.table(), refresh=True)
        self._live.stop()

    def __call__(self, event: Event, at_s: float) -> None:
        """Show one event."""
        match event:
            case RunStarted():
                self._plan = degrees(event.plan)
                self._title = f"{event.algorithm.upper()} on {event.adapter}, {event.mode}"
            case StepObserved():
                self._lines.append(_Line(event, self._plan, []))
            case TransitionFinished():
                self._plan = degrees(event.plan)
                outcome = event.outcome.replace("_", " ")
                self._note(f"transition {outcome} in {seconds(event.elapsed_s)}")
            case Decided() if event.path != "none":
                # The plan column of the next row shows what changed.
                self._note(f"{event.trigger}: {event.path} {_verdict(event)}")
            case DevicesChanged():
                self._note(_devices(event))
            case InputIgnored():
                self._note(f"{event.field} ignored")
            case _:
                return
        self._live.update(self.table())

    def _note(self, text: str) -> None:
        if self._lines:
            self._lines[-1].notes.append(text)

    def table(self) -> Table:
        """Build the table as it stands."""
        table = Table(
            title=self._title,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            expand=True,
        )
        for name, justify in (("step", "right"), ("reward", "right"), ("tokens", "right"),
                              ("latency", "right"), ("predicted", "right")):  # fmt: skip
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # literals
        narrow = self._live.console.width < _NARROW
        table.add_column("plan (tp·pp·dp)", ratio=1 if narrow else None)
        table.add_column("what happened", ratio=1, min_width=24)
        for line in self._lines:
            table.add_row(
                str(line.step.step),
                number(reward_of(line.step)),
                f"{line.step.response_tokens_mean:.0f}",
                seconds(line.step.step_s),
                seconds(line.step.predicted_s),
                line.plan,
                escape("; ".join(line.notes)),
            )
        return table


class PlainLines:
    """One line per step, and one for whatever else happens; no control characters."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plan = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def __call__(self, event: Event, at_s: float) -> None:
        """Show one event."""
        text = self._text(event)
        if text:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _text(self, event: Event) -> str:
        match event:
            case RunStarted():
                self._plan = plan_line(event.plan)
                return f"{event.algorithm} on {event.adapter}, mode {event.mode}: {self._plan}"
            case StepObserved():
                return (
                    f"step {event.step}  reward {number(reward_of(event))}  "
                    f"tokens {event.response_tokens_mean:.0f}  latency {seconds(event.step_s)}  "
                    f"predicted {seconds(event.predicted_s)}  {self._plan}"
                )
            case Decided() if event.path != "none":
                return f"  {_decision(event)}: {event.rule}"
            case PrimitiveFinished():
                error = f": {event.error}" if event.error else ""
                return f"  {event.text}, {seconds(event.end_s - event.start_s)}{error}"
            case TransitionFinished():
                self._plan = plan_line(event.plan)
                error = f": {event.error}" if event.error else ""
                return (
                    f"  transition {event.outcome.replace('_', ' ')} in "
                    f"{seconds(event.elapsed_s)}{error}"
                )
            case DevicesChanged():
                return f"  {_devices(event)}"
            case InputIgnored():
                return f"  ignored {event.field} = {event.value}: {event.reason}"
            case RunFinished():
                return f"after {event.steps} steps, {seconds(event.elapsed_s)}: {event.outcome}"
            case _:
                return ""


def _decision(event: Decided) -> str:
    change = ""
    if event.candidate_plan is not None:
        change = ", ".join(changes(event.current_plan, event.candidate_plan))
    return f"{event.trigger}: {event.path} {_verdict(event)}{f' ({change})' if change else ''}"


def _verdict(event: Decided) -> str:
    return "admitted" if event.admitted else "refused"


def _devices(event: DevicesChanged) -> str:
    parts = [f"lost {', '.join(event.lost)}"] if event.lost else []
    parts += [f"back {', '.join(event.returned)}"] if event.returned else []
    return "devices: " + "; ".join(parts)
