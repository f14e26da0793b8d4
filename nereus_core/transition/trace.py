"""A transition as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

One row per device. A primitive is drawn on every device it touches, with its phases inside; arrows
are the graph's edges.
Source: "Trace Event Format", Google, 2016 (phases X, s, f, M; microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nereus_core.events import Event, PrimitiveFinished, TransitionStarted


def chrome_trace(events: Iterable[Event], transition: str) -> dict[str, Any]:
    """Return the trace of one transition, ready for json.dump; no rows when it is not there."""
    started: TransitionStarted | None = None
    finished: dict[str, PrimitiveFinished] = {}
    for event in events:
        if isinstance(event, TransitionStarted) and event.transition == transition:
            started = event
        elif isinstance(event, PrimitiveFinished) and event.transition == transition:
            finished[event.op_id] = event
    rows = {d: i for i, d in enumerate(sorted({d for p in finished.values() for d in p.devices}))}
    drawn: list[dict[str, Any]] = [_named("process_name", 0, f"transition {transition}")]
    drawn += [_named("thread_name", row, device) for device, row in rows.items()]
    for op in finished.values():
        for row in (rows[device] for device in op.devices):
            drawn += [_slice(op, row), *_phases(op, row)]
    for number, edge in enumerate(started.edges if started else ()):
        first, then = finished.get(edge["before"]), finished.get(edge["after"])
        if first and then:
            name = f"{edge['kind']}: {edge['reason']}"
            drawn.append(_arrow("s", number, name, first.end_s, rows[first.devices[0]]))
            drawn.append(_arrow("f", number, name, then.start_s, rows[then.devices[0]]))
    return {"traceEvents": drawn, "displayTimeUnit": "ms"}


def write_traces(recorded: Sequence[tuple[Event, float]], folder: Path) -> tuple[Path, ...]:
    """Write one trace per transition, named after it, from events with their times."""
    events = [event for event, _ in recorded]
    names = [e.transition for e in events if isinstance(e, TransitionStarted)]
    if names:
        folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"{name}.json" for name in names)
    for name, path in zip(names, paths, strict=True):
        path.write_text(json.dumps(chrome_trace(events, name)), encoding="utf-8")
    return paths


def _named(what: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": row, "args": {"name": name}}


def _slice(op: PrimitiveFinished, row: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{op.kind} {op.stage}",
        "cat": op.kind,
        "pid": 0,
        "tid": row,
        "ts": op.start_s * 1e6,
        "dur": (op.end_s - op.start_s) * 1e6,
        "args": {
            "op_id": op.op_id,
            "text": op.text,
            "moved_bytes": op.moved_bytes,
            "kept_bytes": op.kept_bytes,
            "predicted_s": op.predicted_s,
            "error": op.error,
        },
    }


def _phases(op: PrimitiveFinished, row: int) -> list[dict[str, Any]]:
    """Draw the phases inside their primitive."""
    begun = sorted(op.phases_s.items(), key=lambda item: item[1])
    ends = [at_s for _, at_s in begun[1:]] + [op.end_s]
    return [
        {
            "ph": "X",
            "name": phase,
            "cat": "phase",
            "pid": 0,
            "tid": row,
            "ts": at_s * 1e6,
            "dur": max(0.0, end_s - at_s) * 1e6,
            "args": {"op_id": op.op_id},
        }
        for (phase, at_s), end_s in zip(begun, ends, strict=True)
    ]


def _arrow(phase: str, number: int, name: str, at_s: float, row: int) -> dict[str, Any]:
    end = {"bp": "e"} if phase == "f" else {}
    return {
        "ph": phase,
        "id": number,
        "name": name,
        "cat": "edge",
        "pid": 0,
        "tid": row,
        "ts": at_s * 1e6,
        **end,
    }
