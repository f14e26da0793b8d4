"""``nereus report``: the HTML report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nereus_core.report.html import write_report


def report(
    events: Annotated[Path, typer.Argument(help="events.jsonl of a run.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File to write; report.html beside the events by default."
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", help="events.jsonl of the same job under a fixed plan, to compare with."
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML report: plots, plan timeline, decisions and transitions.

    For example:

      nereus report runs/latest/events.jsonl

      nereus report runs/a/events.jsonl --baseline runs/fixed/events.jsonl -o compare.html
    """
    target = output or events.parent / "report.html"
    write_report(events, target, baseline=baseline)
    typer.echo(str(target))
