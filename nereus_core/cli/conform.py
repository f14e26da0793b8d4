"""``nereus conform``: hold an adapter to the conformance suite, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from nereus_core.cli.outcome import ExitCode
from nereus_core.errors import BackendMissing, ConfigError
from nereus_core.harness import Tier
from nereus_core.registry import Registry

# Source: pytest's ExitCode: 0 ok, 1 tests failed, 2 interrupted, 3 internal, 4 usage, 5 no tests.
_INTERRUPTED, _USAGE = 2, 4


def conform(
    name: Annotated[str, typer.Argument(help="Adapter, as listed by `nereus adapters`.")],
    tier: Annotated[
        Tier, typer.Option("--tier", help="How real the thing under test is.")
    ] = Tier.CONTRACT,
    select: Annotated[str, typer.Option("-k", help="Only cases that match, as in pytest.")] = "",
) -> None:
    """Hold an adapter to the conformance suite (needs the extra `conformance`).

    For example:

      nereus conform sim

      nereus conform torch --tier real -k split
    """
    tiers = Registry.load().declaration(name).tiers
    if tier not in tiers:
        raise ConfigError(
            "--tier", f"adapter {name!r} has no harness for {tier.value!r}; it has {list(tiers)}"
        )
    for module in ("pytest", "nereus_conformance"):
        if find_spec(module) is None:
            raise BackendMissing("conform", module, "pip install 'nereus[conformance]'")
    command = [sys.executable, "-m", "pytest", "--pyargs", "nereus_conformance",
               f"--adapter={name}", f"--tier={tier.value}"]  # fmt: skip
    ended = subprocess.run([*command, *(["-k", select] if select else [])], check=False)
    code = {0: ExitCode.OK, _INTERRUPTED: ExitCode.INTERRUPTED, _USAGE: ExitCode.USAGE}
    raise typer.Exit(int(code.get(ended.returncode, ExitCode.FAILED)))
