"""``nereus run``: start a job, adapt it while it runs, leave a report."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from nereus_core.attach import attached
from nereus_core.checkpoints import Checkpoints
from nereus_core.cli.framework import named_framework, run_framework
from nereus_core.config import NereusConfig
from nereus_core.errors import CheckpointError, ConfigError
from nereus_core.events import EventLog
from nereus_core.launched import Saves, Timed
from nereus_core.registry import Registry
from nereus_core.report.html import write_report
from nereus_core.report.live import view_on
from nereus_core.report.record import last_run
from nereus_core.report.traces import write_traces
from nereus_core.runner import drive


def run(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="nereus.toml of the job.")] = None,
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
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration, as TOML."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Checkpoint to go on from, or a folder of them: the newest is taken."),
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

      nereus run nereus.toml --resume runs/latest/checkpoints

      nereus run nereus.toml --set policy.delta=0.1 --set 'backend.events=[]'

    A framework's own job, whose flags stand behind --; CONFIG may be left out:

      nereus run --FRAMEWORK [CONFIG] --mode advise -- FLAGS
    """
    if named_framework(ctx) is not None:
        own = {"--resume": resume is not None, "--steps": steps is not None, "--quiet": quiet}
        if given := [option for option, is_given in own.items() if is_given]:
            raise typer.BadParameter(
                f"{', '.join(given)}: not with a framework's own job; expected its flags behind --"
            )
        keys = _keys(config, assign or [], adapter, mode, run_dir)
        return run_framework(ctx, keys)
    if config is None:
        raise typer.BadParameter("names no job: expected CONFIG, or --FRAMEWORK -- ARGUMENTS")
    settings = _settings(config, assign or [], adapter, mode, run_dir, resume)
    sys.path.insert(0, str(config.resolve().parent))
    settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    events = settings.run_dir / "events.jsonl"
    console = Console()
    try:
        with _terminated_is_interrupted():
            options = {"--adapter": adapter, "--mode": mode, "--run-dir": run_dir}
            command = _command(config, options, assign or [])
            checkpoints = Checkpoints(
                settings.checkpoint,
                settings.run_dir,
                lambda folder: f"{command} --resume {shlex.quote(str(folder))}",
            )
            _drive(settings, events, console, steps, checkpoints, quiet)
    finally:
        if events.exists() and (recorded := last_run(events)):
            write_traces((event for event, _ in recorded), settings.run_dir / "traces")
            write_report(events, settings.run_dir / "report.html")
            typer.echo(str(settings.run_dir / "report.html"))


def _settings(
    config: Path,
    assignments: Sequence[str],
    adapter: str | None,
    mode: str | None,
    run_dir: Path | None,
    resume: Path | None,
) -> NereusConfig:
    """Read the file, then what the command line says instead."""
    settings = NereusConfig.load(config)
    values = settings.model_dump()
    for text in assignments:
        values = _merged(values, _assignment(text))
    if resume is not None:
        values = _merged(values, {"checkpoint": {"resume": resume}})
    given = {"adapter": adapter, "mode": mode, "run_dir": run_dir}
    return NereusConfig.of(values | {key: v for key, v in given.items() if v is not None})


def _keys(
    config: Path | None,
    assignments: Sequence[str],
    adapter: str | None,
    mode: str | None,
    run_dir: Path | None,
) -> dict[str, Any]:
    """Write what the command line says as keys that a plugin reads."""
    keys: dict[str, Any] = {}
    for text in assignments:
        keys = _merged(keys, _assignment(text))
    given = {"config": config, "adapter": adapter, "mode": mode, "run_dir": run_dir}
    return keys | {key: value for key, value in given.items() if value is not None}


def _assignment(text: str) -> dict[str, Any]:
    """Read ``KEY=VALUE`` as TOML; a value that is none is a string without its quotes."""
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError("--set", f"got {text!r}; expected KEY=VALUE")
    for attempt in (text, f"{key} = {json.dumps(value)}"):
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(attempt)
    raise ConfigError("--set", f"{key!r} is not a key; expected e.g. policy.delta=0.1")


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay nested changes over nested values."""
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(change, Mapping)
        merged[key] = _merged(old, change) if both else change  # type: ignore[arg-type]  # both
    return merged


def _command(config: Path, options: Mapping[str, object], assign: Sequence[str]) -> str:
    """Spell this command with the options that were given, but not what it goes on from."""
    words = ["nereus", "run", str(config)]
    for option, value in options.items():
        words += [] if value is None else [option, str(value)]
    for assignment in assign:
        words += ["--set", assignment]
    return shlex.join(words)


def _drive(
    settings: NereusConfig,
    events: Path,
    console: Console,
    steps: int | None,
    checkpoints: Checkpoints,
    quiet: bool,
) -> None:
    """Launch, attach, and loop; everything that was opened is closed, in reverse order."""
    registry = Registry.load()
    with ExitStack() as opened:
        launched = opened.enter_context(closing(registry.launch(settings.adapter, settings)))
        if settings.checkpoint.resume is not None and not isinstance(launched, Saves):
            raise CheckpointError(
                settings.checkpoint.resume,
                f"jobs of adapter {settings.adapter!r} resume from none",
                "start without --resume",
            )
        clock = launched.clock_s if isinstance(launched, Timed) else time.monotonic
        log = opened.enter_context(EventLog(events, clock))
        if not quiet:
            log.subscribe(opened.enter_context(view_on(console)))
        controller = opened.enter_context(attached(registry, launched.handle, settings, log, clock))
        ran = drive(launched, controller.at_boundary, max_steps=steps, checkpoints=checkpoints)
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
