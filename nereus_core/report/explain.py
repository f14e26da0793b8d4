"""What ``nereus explain`` prints: decisions and transitions in words, from the events alone."""

from __future__ import annotations

from collections.abc import Iterator

from nereus_core.admission import explain_event
from nereus_core.events import InputIgnored
from nereus_core.report.quantities import amount, changes, seconds
from nereus_core.report.record import RunRecord, TransitionRecord


def explain(run: RunRecord, step: int | None = None) -> Iterator[str]:
    """Yield one block of text per decision and transition, of one step or of all.

    Boundaries at which nothing woke the planner are left out unless their step is asked for.
    """
    for entry in run.story:
        if isinstance(entry, TransitionRecord):
            if step in (None, entry.started.step):
                yield explain_transition(entry)
        elif entry.step == step or (step is None and entry.path != "none"):
            yield explain_event(entry)


def explain_ignored(run: RunRecord) -> str | None:
    """Say how many measurements made no sense, and which; None when all did."""
    if not run.ignored:
        return None
    groups: dict[tuple[str, str], list[InputIgnored]] = {}
    for part in run.ignored:
        groups.setdefault((part.field, part.reason), []).append(part)
    lines = [f"{len(run.ignored)} measurements ignored; no plan was made from them:"]
    lines += [
        f"  {len(parts)} x {field}, e.g. {parts[0].value} after step {parts[0].step}: {reason}"
        for (field, reason), parts in groups.items()
    ]
    return "\n".join(lines)


def explain_transition(record: TransitionRecord) -> str:
    """Say what a transition did, primitive by primitive, and why in that order."""
    started, end = record.started, record.finished
    if end is None:
        head = f"Transition after step {started.step}: unfinished."
    else:
        head = (
            f"Transition after step {started.step}: {end.outcome.replace('_', ' ')} in "
            f"{seconds(end.elapsed_s)} (predicted {seconds(end.predicted_s)}), "
            f"{amount(end.moved_bytes)} moved."
        )
    lines = [head]
    if end is not None:
        lines += [f"  {change}" for change in changes(record.plan_before, end.plan)]
        lines += [f"  error: {end.error}"] if end.error else []
    ran = {p.op_id: p for p in record.primitives}
    for op in started.ops:
        done = ran.get(op["op_id"])
        if done is None:
            when = "did not run"
        else:
            when = f"from {seconds(done.start_s)} to {seconds(done.end_s)}" + (
                f", failed: {done.error}" if done.error else ""
            )
        lines.append(f"  {op['op_id']}  {op['text']}: {when}")
        lines += [
            f"      after {e['before']} ({e['kind']}: {e['reason']})"
            for e in started.edges
            if e["after"] == op["op_id"]
        ]
    return "\n".join(lines)
