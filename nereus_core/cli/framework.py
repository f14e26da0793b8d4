"""``nereus run --NAME -- ARGUMENTS``: a framework's own command with Nereus in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from nereus_core.registry import Registry

_NAME, _ARGUMENTS = "nereus.framework", "nereus.arguments"


class OfFramework(TyperCommand):
    """A command that takes ``--NAME`` and, behind ``--``, what belongs to the framework NAME."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep back what belongs to the framework; everything else is parsed as always."""
        if "--" in args:
            at = args.index("--")
            flags = {f"--{name}": name for name in Registry.load().frameworks()}
            named = [word for word in args[:at] if word in flags]
            if len(named) == 1:
                ctx.meta[_NAME] = flags[named[0]]
                ctx.meta[_ARGUMENTS] = args[at + 1 :]
                args = [word for word in args[:at] if word != named[0]]
        return super().parse_args(ctx, args)


def named_framework(ctx: typer.Context) -> str | None:
    """Return the framework that the command line names, None where it names none."""
    name: str | None = ctx.meta.get(_NAME)
    return name


def run_framework(ctx: typer.Context, keys: Mapping[str, object]) -> None:
    """Run the framework's command; exits with its exit code where that is not 0."""
    arguments: Sequence[str] = ctx.meta[_ARGUMENTS]
    if code := Registry.load().run_framework(ctx.meta[_NAME], keys, arguments):
        raise typer.Exit(code)
