"""Whether an adapter's backend is installed, read from package metadata and never by importing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from nereus_core.declaration import AdapterDeclaration
from nereus_core.errors import BackendMissing, BackendVersion, ConfigError


class State(StrEnum):
    """Of a backend on this machine."""

    READY = "ready"
    MISSING = "missing"
    VERSION = "version mismatch"


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What of a backend is installed, and what to do when it is not enough."""

    state: State
    installed: str | None
    """Version found; None when it is not installed or there is no backend."""
    todo: str
    """The line that mends it; empty when ready."""


def requirement_of(declaration: AdapterDeclaration) -> Requirement | None:
    """Parse the requirement; raises ConfigError for one that is not PEP 508."""
    if declaration.requirement is None:
        return None
    try:
        return Requirement(declaration.requirement)
    except InvalidRequirement as error:
        raise ConfigError(
            f"adapter {declaration.name!r}",
            f"requirement {declaration.requirement!r} is not PEP 508",
        ) from error


def backend_status(declaration: AdapterDeclaration) -> BackendStatus:
    """Compare what is installed with what an adapter requires."""
    requirement = requirement_of(declaration)
    if requirement is None:
        return BackendStatus(State.READY, None, "")
    install = declaration.install or f"pip install '{requirement}'"
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return BackendStatus(State.MISSING, None, install)
    if not requirement.specifier.contains(found, prereleases=True):
        return BackendStatus(State.VERSION, found, install)
    return BackendStatus(State.READY, found, "")


def require_backend(declaration: AdapterDeclaration) -> BackendStatus:
    """Return the status of a backend that is ready; raises BackendMissing or BackendVersion."""
    status = backend_status(declaration)
    requirement = declaration.requirement or ""
    if status.state is State.MISSING:
        raise BackendMissing(declaration.name, requirement, status.todo)
    if status.state is State.VERSION:
        raise BackendVersion(declaration.name, str(status.installed), requirement)
    return status
