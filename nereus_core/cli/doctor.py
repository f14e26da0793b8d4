"""``nereus doctor``: why an adapter does not work here, checked without importing its backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from nereus_core.backend_status import require_backend
from nereus_core.capabilities import Feature, Level
from nereus_core.cli.outcome import ExitCode, print_json
from nereus_core.declaration import AdapterDeclaration
from nereus_core.errors import AdapterError, NereusError, SeamBroken
from nereus_core.primitives import Kind
from nereus_core.registry import Registry
from nereus_core.report.pending import pending_in
from nereus_core.seams import check_seam
from nereus_core.workload import Stage


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question; ``todo`` says what to do about a no."""

    question: str
    ok: bool
    answer: str
    todo: str = ""


def doctor(
    name: Annotated[str, typer.Argument(help="Adapter, as listed by `nereus adapters`.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="Folder of a run, to look into as well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Check an adapter step by step, stopping at the first no with what to do.

    Asks in order: does its entry point load, is its backend installed in a version it supports, do
    the seams it stands on hold in the installed source (read, not imported), is a device visible;
    of a run, whether a transition was left unfinished.

    For example:

      nereus doctor torch

      nereus doctor verl --json

      nereus doctor torch --run runs/latest
    """
    findings = list(examine(Registry.load(), name))
    if run_dir is not None:
        findings.append(_ended(run_dir))
    ok = all(f.ok for f in findings)
    if as_json:
        print_json({"adapter": name, "ok": ok, "findings": [asdict(f) for f in findings]})
    else:
        console = Console()
        for finding in findings:
            mark = "[green]yes[/green]" if finding.ok else "[red]no [/red]"
            console.print(f"{mark}  {finding.question}: {escape(finding.answer)}", highlight=False)
            if finding.todo:
                console.print(f"     -> {escape(finding.todo)}", highlight=False)
        if ok:
            for line in _gaps(Registry.load().declaration(name)):
                console.print(f"     {escape(line)}", highlight=False)
    raise typer.Exit(int(ExitCode.OK if ok else ExitCode.BACKEND))


def examine(registry: Registry, name: str) -> Iterator[Finding]:
    """Yield findings up to the first no; raises NoSuchAdapter for a name that is nowhere."""
    question = "entry point loads"
    for broken in registry.broken:
        if broken.name == name:
            todo = f"mend or reinstall {broken.distribution} {broken.version}"
            yield Finding(question, False, broken.error, todo)
            return
    found = registry.installed(name)
    declaration = found.declaration
    yield Finding(question, True, str(found.plugin))

    question = "backend meets the requirement"
    try:
        status = require_backend(declaration)
    except AdapterError as error:
        yield Finding(question, False, str(error), found.status.todo)
        return
    installed = f"{declaration.requirement}, found {status.installed}"
    yield Finding(question, True, installed if declaration.requirement else "needs none")

    question = "seams hold in the installed source"
    for seam in declaration.seams:
        try:
            check_seam(seam)
        except SeamBroken as error:
            todo = f"install a version inside {declaration.requirement}, or update the adapter"
            yield Finding(question, False, str(error), todo)
            return
    yield Finding(question, True, f"{len(declaration.seams)} checked")
    yield _device(declaration)


def _ended(run_dir: Path) -> Finding:
    question = "its transitions have ended"
    try:
        pending = pending_in(run_dir)
    except NereusError as error:
        return Finding(question, False, str(error))
    if pending is not None:
        name, ops = pending.graph.name, len(pending.graph.ops)
        answer = f"{name} has not: {len(pending.done)} of {ops} primitives are done"
        todo = f"`nereus explain {run_dir / 'events.jsonl'}` says how to go on"
        return Finding(question, False, answer, todo)
    return Finding(question, True, "none is pending")


def _device(declaration: AdapterDeclaration) -> Finding:
    question = "a device is visible"
    accelerators = sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit())
    if Path("/dev/kfd").exists():
        accelerators.append("kfd")
    if accelerators and os.environ.get("CUDA_VISIBLE_DEVICES", "unset") != "":
        return Finding(question, True, ", ".join(accelerators))
    if declaration.requirement is None or set(declaration.tiers) & {"contract", "real"}:
        return Finding(question, True, f"no accelerator; {os.cpu_count()} CPU cores serve")
    return Finding(
        question, False, "no accelerator, and the adapter has no tier that runs without one",
        "run on a machine with a GPU, and look at CUDA_VISIBLE_DEVICES",
    )  # fmt: skip


def _gaps(declaration: AdapterDeclaration) -> Iterator[str]:
    """Say what the adapter declares it cannot do, with its reasons."""
    table = {
        f"{kind} of {stage} stages": declaration.capabilities.of(kind, stage)
        for kind in Kind
        for stage in Stage
    } | {str(f): declaration.capabilities.features.get(f) for f in Feature}
    for what, support in table.items():
        if support is None:
            yield f"{what}: not declared"
        elif support.level is not Level.FULL:
            tracking = f" ({support.tracking})" if support.tracking else ""
            yield f"{what}: {support.level.replace('_', ' ')}: {support.reason}{tracking}"
