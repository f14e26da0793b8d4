"""``nereus adapters``: what is installed, what is broken, who can do what."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nereus_core.backend_status import State
from nereus_core.capabilities import Feature, Level, Support
from nereus_core.cli.outcome import print_json
from nereus_core.primitives import Kind
from nereus_core.registry import Installed, Registry
from nereus_core.workload import Stage

_LETTERS = {Stage.TRAIN: "T", Stage.GENERATE: "G", Stage.INFER: "I"}


def adapters(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List installed adapters, their backends, and the primitives they can do.

    For example:

      nereus adapters

      nereus adapters --json | jq '.adapters[].name'
    """
    registry = Registry.load()
    if as_json:
        print_json(
            {
                "adapters": [_json(a) for a in registry.adapters()],
                "broken": [
                    {"name": b.name, "distribution": b.distribution, "version": b.version,
                     "error": b.error}
                    for b in registry.broken
                ],
            }
        )  # fmt: skip
        return
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NAME", "BACKEND", "INSTALLED", "STATUS", *(k.upper() for k in Kind), "FROM"):
        table.add_column(name, overflow="fold")
    for installed in registry.adapters():
        declaration, status = installed.declaration, installed.status
        cells = [_letters(installed, kind) for kind in Kind]
        state = str(status.state) if status.state is State.READY else f"[red]{status.state}[/red]"
        table.add_row(
            escape(declaration.name),
            escape(declaration.requirement or "(none)"),
            status.installed or "–",
            state + (f"\n{escape(status.todo)}" if status.todo else ""),
            *cells,
            f"{escape(installed.plugin.distribution)} {escape(installed.plugin.version)}",
        )
    for broken in registry.broken:
        table.add_row(
            escape(broken.name), "–", "–", f"[red]broken[/red]\n{escape(broken.error)}",
            *["–"] * len(Kind), f"{escape(broken.distribution)} {escape(broken.version)}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "\n(T train, G generate, I infer; --json for machines; `nereus doctor NAME` for the "
        "reasons)",
        highlight=False,
    )


def _letters(installed: Installed, kind: Kind) -> str:
    """Write the stages in which a primitive works with the backend version that is installed."""
    found = ""
    for stage, letter in _LETTERS.items():
        support = installed.declaration.capabilities.of(kind, stage)
        # A backend that is not installed yet is taken to be new enough.
        version = installed.status.installed
        if support and (support.at(version) or (version is None and support.level is Level.SINCE)):
            found += letter
    return found or "–"


def _json(installed: Installed) -> dict[str, object]:
    declaration, status = installed.declaration, installed.status
    return {
        "name": declaration.name,
        "summary": declaration.summary,
        "requirement": declaration.requirement,
        "installed": status.installed,
        "status": str(status.state),
        "todo": status.todo,
        "distribution": installed.plugin.distribution,
        "version": installed.plugin.version,
        "tiers": list(declaration.tiers),
        "capabilities": {
            str(kind): {
                str(stage): _support(declaration.capabilities.of(kind, stage)) for stage in Stage
            }
            for kind in Kind
        },
        "features": {str(f): _support(declaration.capabilities.features.get(f)) for f in Feature},
    }


def _support(support: Support | None) -> dict[str, str] | None:
    if support is None:
        return None
    found = {"level": str(support.level), "reason": support.reason, "since": support.version,
             "tracking": support.tracking}  # fmt: skip
    return {key: value for key, value in found.items() if value}
