"""``nereus explain``: decisions and transitions in words, from the events alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from nereus_core.cli.outcome import print_json
from nereus_core.errors import ConfigError
from nereus_core.report.explain import explain as explained
from nereus_core.report.explain import explain_ignored
from nereus_core.report.pending import explain_pending, pending_in
from nereus_core.report.record import RunRecord


def explain(
    events: Annotated[Path, typer.Argument(help="events.jsonl of a run.")],
    step: Annotated[
        int | None, typer.Option("--step", "-s", help="Only decisions after this step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decisions as JSON.")] = False,
) -> None:
    """Say why each decision was taken, and what each transition did in which order.

    A transition that the journal beside the events says has not ended comes last.

    For example:

      nereus explain runs/latest/events.jsonl

      nereus explain runs/latest/events.jsonl --step 12
    """
    run = RunRecord.read(events)
    if step is not None and all(d.step != step for d in run.decisions):
        steps = [d.step for d in run.decisions]
        seen = f"decisions follow steps {min(steps)} to {max(steps)}" if steps else "there is none"
        raise ConfigError("--step", f"no decision after step {step}; {seen}")
    if as_json:
        print_json([dataclasses.asdict(d) for d in run.decisions if step in (None, d.step)])
        return
    blocks = list(explained(run, step))
    if step is None and (ignored := explain_ignored(run)):
        blocks.append(ignored)
    if step is None and (pending := pending_in(events.parent)) is not None:
        blocks.append(explain_pending(pending))
    typer.echo("\n\n".join(blocks) if blocks else "Nothing woke the planner in this run.")
