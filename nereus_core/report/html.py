"""The HTML report: one self-contained file, from the events of a run alone."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

from nereus_core import __version__
from nereus_core.events import RunStarted
from nereus_core.report.page import badge, fold
from nereus_core.report.quantities import plan_line
from nereus_core.report.record import RunRecord
from nereus_core.report.sections import plan_timeline, plots, tiles
from nereus_core.report.tables import comparison, decisions, transition

_OPEN = 10
"""Transitions shown unfolded; chosen, not measured."""


def render(run: RunRecord, *, title: str, baseline: RunRecord | None = None) -> str:
    """Return the whole page; ``baseline`` is a run of the same job under its start-up plan."""
    started = run.started
    facts = (
        f"{started.algorithm.upper()} on adapter {started.adapter}, mode {started.mode}, "
        f"{_devices(started)}, {started.global_batch} sequences per step"
    )
    if run.finished is None:
        state = "The events end before the run does."
    else:
        state = f"The run ended: {run.finished.outcome.rstrip('.')}."
    if run.finished is not None and run.finished.outcome.startswith("failed"):
        state = f"{badge('failed', 'bad')} {escape(state)}"
    else:
        state = escape(state)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="intro">{escape(facts)}. {state}<br>'
        f"Start-up plan: <code>{escape(plan_line(started.plan))}</code></p>",
        tiles(run),
    ]
    if run.steps:
        parts += ["<h2>Over the run</h2>", plan_timeline(run), plots(run)]
    else:
        parts.append('<p class="quiet">No step was observed.</p>')
    parts += [
        "<h2>Decisions</h2>",
        '<p class="intro">What woke the planner, what it would change, and the rule that decided. '
        "A transition is admitted when its saving over the horizon repays its cost, or at once "
        "when the plan can no longer run.</p>",
        decisions(run),
    ]
    if run.transitions:
        parts.append("<h2>Transitions</h2>")
        parts.append(
            '<p class="intro">Primitives on the transition’s own clock; bars that overlap ran '
            "concurrently, thin lines are edges of the graph.</p>"
        )
        parts += [transition(t) for t in run.transitions[:_OPEN]]
        if more := run.transitions[_OPEN:]:
            parts.append(fold(f"{len(more)} more transitions", "".join(map(transition, more))))
    if baseline is not None and baseline.steps and run.steps:
        parts.append("<h2>Against the baseline</h2>")
        parts.append(
            '<p class="intro">The same job under the plan '
            f"<code>{escape(plan_line(baseline.started.plan))}</code>, mode "
            f"{escape(baseline.started.mode)}.</p>"
        )
        parts.append(comparison(run, baseline))
    parts.append(
        f"<footer>Nereus {escape(__version__)}. Read from the run’s events alone.</footer>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_stylesheet()}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def write_report(events: Path, output: Path, *, baseline: Path | None = None) -> None:
    """Write the report of an event file.

    Raises:
        ConfigError: a file cannot be read or written.
        NereusError: a file holds no run.
    """
    run = RunRecord.read(events)
    other = RunRecord.read(baseline) if baseline is not None else None
    title = f"Nereus run: {events.resolve().parent.name}"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(run, title=title, baseline=other), encoding="utf-8")


def _stylesheet() -> str:
    return files("nereus_core.report").joinpath("report.css").read_text(encoding="utf-8")


def _devices(started: RunStarted) -> str:
    """Count the devices of the start-up plan, and those it could have used where they are more."""
    used = {d for placed in started.plan.values() for unit in placed["units"] for d in unit}
    more = len(started.devices) > len(used)
    return f"{len(used)}{f' of {len(started.devices)}' if more else ''} devices"
