"""AdapterDeclaration: what an adapter says of itself without importing its backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus_core.capabilities import Capabilities


@dataclass(frozen=True, slots=True)
class Seam:
    """A name in a framework that an adapter stands on; checked against the source by ``ast``."""

    module: str
    """Dotted module, e.g. ``verl.trainer.ppo.v1``."""
    qualname: str
    """Function, class, ``Class.method`` or ``Class.attribute`` inside it; of what a function
    defines inside itself, ``function.Class.method``."""
    parameters: tuple[str, ...] | None = None
    """Parameter names that must be there, in this order; None when any signature will do."""

    to_change: bool = False
    """Needed only where a job is changed: one that is watched can do without."""

    def __str__(self) -> str:
        shape = "" if self.parameters is None else f"({', '.join(self.parameters)})"
        return f"{self.module}:{self.qualname}{shape}"


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """Why a conformance case fails, and what it says when it does."""

    reason: str
    """With a link."""
    says: str
    """Regular expression, found in the text of the error that ends the case."""


@dataclass(frozen=True, slots=True)
class AdapterDeclaration:
    """Name, backend requirement, capabilities, seams, known failures."""

    name: str
    """Lower-case identifier, unique among installed adapters."""
    summary: str
    capabilities: Capabilities
    requirement: str | None = None
    """PEP 508 requirement of the backend, e.g. ``verl>=0.9,<0.10``; None when there is none."""
    install: str = ""
    """The line that installs the backend."""
    seams: tuple[Seam, ...] = ()
    tiers: tuple[str, ...] = ("contract",)
    """Conformance tiers the adapter has a harness for."""
    known_failures: Mapping[str, str | KnownFailure] = field(default_factory=dict)
    """Conformance case -> reason with a link; such a case is a strict xfail, of any error where the
    reason alone is given."""
