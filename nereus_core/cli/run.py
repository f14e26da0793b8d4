"""``nereus run``: start a job, adapt it while it runs, leave a report."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.events import EventLog
from nereus_core.launched import Timed
from nereus_core.registry import Registry
from nereus_core.report.html import write_report
from nereus_core.report.live import view_on
from nereus_core.report.record import last_run
from nereus_core.report.traces import write_traces
from nereus_core.runner import drive


def run(
    config: Annotated[Path, typer.Argument(help="nereus.toml of the job.")],
    adapter: Annotated[
        str | None, typer.Option(help="Adapter, instead of the one configured.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="observe, advise or adapt, instead of what is configured.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="RL steps at most; the job's own number by default.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of events, traces and report.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print paths only.")] = False,
) -> None:
    """Run a job under Nereus: it is started, watched, and changed when that pays.

    Shows a live table on a terminal and one line per step elsewhere. Leaves events.jsonl, a trace
    per transition (open in ui.perfetto.dev) and report.html in the run's folder. The folder of
    CONFIG is importable, so a job may name code that lies beside it.

    For example:

      nereus run examples/adaptive_grpo/nereus.toml

      nereus run nereus.toml --mode observe --steps 20 --run-dir runs/fixed
    """
    settings = _settings(config, adapter, mode, run_dir)
    sys.path.insert(0, str(config.resolve().parent))
    settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    events = settings.run_dir / "events.jsonl"
    console = Console()
    try:
        with _terminated_is_interrupted():
            _drive(settings, events, console, steps, quiet)
    finally:
        if events.exists() and (recorded := last_run(events)):
            write_traces((event for event, _ in recorded), settings.run_dir / "traces")
            write_report(events, settings.run_dir / "report.html")
            typer.echo(str(settings.run_dir / "report.html"))


def _settings(
    config: Path, adapter: str | None, mode: str | None, run_dir: Path | None
) -> NereusConfig:
    settings = NereusConfig.load(config)
    given = {"adapter": adapter, "mode": mode, "run_dir": run_dir}
    if not settings.enabled:
        given["mode"] = "observe"
    changed = {key: value for key, value in given.items() if value is not None}
    return NereusConfig.of(settings.model_dump() | changed)


def _drive(
    settings: NereusConfig, events: Path, console: Console, steps: int | None, quiet: bool
) -> None:
    """Launch, attach, and loop; everything that was opened is closed, in reverse order."""
    registry = Registry.load()
    with ExitStack() as opened:
        launched = opened.enter_context(closing(registry.launch(settings.adapter, settings)))
        attached = registry.create(settings.adapter, launched.handle, settings)
        opened.enter_context(closing(attached))
        clock = launched.clock_s if isinstance(launched, Timed) else time.monotonic
        log = opened.enter_context(EventLog(events, clock))
        if not quiet:
            log.subscribe(opened.enter_context(view_on(console)))
        found = registry.installed(settings.adapter)
        controller = Controller(
            attached,
            settings,
            log,
            registry.notify,
            clock,
            veto=registry.veto,
            capabilities=found.declaration.capabilities,
            backend_version=found.status.installed,
        )
        try:
            ran = drive(launched, controller.at_boundary, max_steps=steps)
        except KeyboardInterrupt:
            controller.finished("interrupted")
            raise
        except Exception as error:
            controller.finished(f"failed: {type(error).__name__}: {error}")
            raise
        controller.finished("done" if launched.finished else f"stopped after {ran.steps} steps")


@contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a preempted run still closes its job and reports."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
