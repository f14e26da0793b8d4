"""The hooks of this room: what a plugin asks its adapter besides the core's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nereus_core.hookspecs import hookspec


@hookspec(firstresult=True)
def nereus_resume(name: str, handle: Any, part: str, folder: Path) -> int | None:
    """Load a checkpoint that the framework could not load itself: of another number of ranks.

    *handle* is the framework's own job, not yet attached to; *part* one of its models (``actor``,
    ``critic``); *folder* what the framework is about to load. Returns the number of ranks that
    saved it, or None where the framework loads it as ever. Stops at the first result that is not
    None.

    Called on: the driver.
    Called when: a framework resumes a job with Nereus switched on, before it loads.
    """
