"""How a command ends: exit codes, errors as one readable block, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperGroup

from nereus_core.errors import (
    AdapterError,
    ConfigError,
    LayoutError,
    ModelConfigError,
    NereusError,
    NoFeasiblePlan,
    NoSuchAdapter,
    PlanError,
)


class ExitCode(IntEnum):
    """What the exit status of ``nereus`` means."""

    OK = 0
    FAILED = 1
    """The job or the conformance run failed."""
    USAGE = 2
    """The command line or the configuration cannot be used."""
    BACKEND = 3
    """The adapter or its backend is missing or broken."""
    NO_PLAN = 4
    """No plan fits in memory."""
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 ok, 1 the job or conformance failed, 2 usage or configuration error, "
    "3 adapter or backend missing or broken, 4 no feasible plan, 130 interrupted."
)


def exit_code_of(error: NereusError) -> ExitCode:
    """Say with which status an error ends the command."""
    match error:
        case NoFeasiblePlan():
            return ExitCode.NO_PLAN
        # A name that is nowhere was mistyped; one that is broken needs mending.
        case NoSuchAdapter() if all(b.partition(":")[0] != error.name for b in error.broken):
            return ExitCode.USAGE
        case AdapterError():
            return ExitCode.BACKEND
        case ConfigError() | ModelConfigError() | LayoutError() | PlanError():
            return ExitCode.USAGE
        case _:
            return ExitCode.FAILED


class Guarded(TyperGroup):
    """A group of commands in which our errors and Ctrl-C end in a block and an exit code."""

    def invoke(self, ctx: Any) -> object:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except NereusError as error:
            show_error(error)
            raise typer.Exit(int(exit_code_of(error))) from error
        except KeyboardInterrupt as error:
            Console(stderr=True).print("interrupted")
            raise typer.Exit(int(ExitCode.INTERRUPTED)) from error
        except BrokenPipeError as error:  # e.g. `nereus explain ... | head`
            # Python flushes stdout once more on exit; give it somewhere to write.
            sys.stdout = open("/dev/null", "w")  # noqa: SIM115  (lives until the process ends)
            raise typer.Exit(int(ExitCode.OK)) from error


def show_error(error: NereusError) -> None:
    """Print an error as one block on stderr."""
    console = Console(stderr=True)
    title = type(error).__name__
    if console.is_terminal:
        console.print(Panel(Text(str(error)), title=title, title_align="left", border_style="red"))
    else:
        console.print(f"{title}: {error}", soft_wrap=True, markup=False, highlight=False)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print a value for machines."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
