"""The command ``nereus``: one file per subcommand, errors and exit codes in `outcome`."""

from __future__ import annotations

from typing import Annotated

import typer

from nereus_core import __version__
from nereus_core.cli.adapters import adapters
from nereus_core.cli.conform import conform
from nereus_core.cli.doctor import doctor
from nereus_core.cli.explain import explain
from nereus_core.cli.framework import OfFramework
from nereus_core.cli.outcome import EXIT_CODES, Guarded
from nereus_core.cli.plan import plan
from nereus_core.cli.report import report
from nereus_core.cli.run import run

app = typer.Typer(
    name="nereus",
    cls=Guarded,
    help="Adaptive parallelism for running RL post-training jobs.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(cls=OfFramework, epilog=EXIT_CODES)(run)
for command in (adapters, doctor, plan, explain, report, conform):
    app.command(epilog=EXIT_CODES)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nereus {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Adaptive parallelism for running RL post-training jobs."""


def main() -> None:
    """Run the command line; exits with one of the codes of `outcome`."""
    app(prog_name="nereus")
