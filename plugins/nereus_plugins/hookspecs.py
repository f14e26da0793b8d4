"""The hooks of this room: what a plugin asks its adapter besides the core's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereus_core.hookspecs import hookspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nereus_core.plan import Plan
    from nereus_core.workload import Job


@hookspec(firstresult=True)
def nereus_register_engine(name: str) -> bool | None:
    """Make the adapter's own training engine known to the framework in this process.

    Returns True where there is one. Stops at the first result that is not None.

    Called on: every process that imports the framework's engines.
    Called when: they have been imported, in a job that has asked for the adapter's own.
    """


@hookspec(firstresult=True)
def nereus_environment(name: str, backend: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return what the job's processes need in their environment for the adapter's own engine.

    *backend* is the adapter's part of the settings. Raises ConfigError where it makes no sense, as
    long as nothing has started. Stops at the first result that is not None.

    Called on: the driver.
    Called when: a framework is about to start the processes of a job that has asked for the
    adapter's own engine.
    """


@hookspec(firstresult=True)
def nereus_saved_ranks(name: str, handle: Any, part: str, folder: Path) -> int | None:
    """Say how many ranks saved a checkpoint that the framework could not load itself.

    *handle* is the framework's own job, not yet attached to; *part* one of its models (``actor``,
    ``critic``); *folder* what the framework is about to load. None where the framework loads it as
    ever. No rank is touched. Stops at the first result that is not None.

    Called on: the driver.
    Called when: a framework resumes a job with Nereus switched on, before it loads.
    """


@hookspec(firstresult=True)
def nereus_resume(
    name: str, handle: Any, part: str, folder: Path, ranks: int, timeout_s: float
) -> bool | None:
    """Load a checkpoint that *ranks* ranks saved on those that the job has; returns True.

    Raises what goes wrong: from then on ranks may hold a part of it. Stops at the first result
    that is not None.

    Called on: the driver.
    Called when: `nereus_saved_ranks` has named a number, with the same arguments.
    """


@hookspec(firstresult=True)
def nereus_overrides(
    name: str,
    handle: Any,
    job: Job,
    backend: Mapping[str, Any],
    current: Plan,
    wanted: Plan,
) -> str | None:
    """Say in the framework's own words what a user would set to start the job on another plan.

    *handle* is the framework's own job, *job* what its adapter says of it, *backend* the adapter's
    settings; *current* is the plan in force. Asks no process. Stops at the first result that is not
    None.

    Called on: the driver.
    Called when: mode advise would have changed the plan, once for each plan.
    """
