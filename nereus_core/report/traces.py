"""A Chrome trace of every transition of a run, one file each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from nereus_core.events import Event, TransitionStarted
from nereus_core.transition.trace import chrome_trace


def write_traces(events: Iterable[Event], folder: Path) -> tuple[Path, ...]:
    """Write ``TRANSITION.json`` per transition into a folder, which is made when there is one.

    Open them in https://ui.perfetto.dev or chrome://tracing.
    """
    recorded, written = tuple(events), []
    for event in recorded:
        if isinstance(event, TransitionStarted):
            folder.mkdir(parents=True, exist_ok=True)
            # A transition is named by its controller; only its word characters reach the disk.
            name = "".join(c if c.isalnum() or c in "-_." else "-" for c in event.transition)
            path = folder / f"{name.lstrip('.')}.json"
            path.write_text(json.dumps(chrome_trace(recorded, event.transition)), encoding="utf-8")
            written.append(path)
    return tuple(written)
