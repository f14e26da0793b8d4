"""What an adapter declares, checked without a job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from nereus_conformance.suite import Suite
from nereus_core.backend_status import State, backend_status
from nereus_core.capabilities import Capabilities, Level, Support
from nereus_core.config import NereusConfig
from nereus_core.errors import BackendMissing, WrongHandle
from nereus_core.primitives import Kind
from nereus_core.workload import Stage


def _entries(capabilities: Capabilities) -> Iterator[tuple[str, Support]]:
    for kind in Kind:
        for stage in Stage:
            if support := capabilities.of(kind, stage):
                yield f"{kind}/{stage}", support
    for feature, support in capabilities.features.items():
        yield str(feature), support


def _backend(suite: Suite) -> Requirement:
    if suite.declaration.requirement is None:
        pytest.skip("the adapter declares no backend")
    return Requirement(suite.declaration.requirement)


def test_listing_imports_no_backend(suite: Suite) -> None:
    """Declaring an adapter imports nothing of its backend, so adapters that cannot run are listed.

    If this fails, check that the plugin's module imports the framework inside functions only.
    """
    name = _backend(suite).name
    roots = [m for m, owners in metadata.packages_distributions().items() if name in owners]
    code = (
        "import sys; from nereus_core.registry import Registry; Registry.load().adapters(); "
        f"print(sorted(set({roots!r}) & set(sys.modules)))"
    )
    # The process is on its own entry point alone: what other plugins import is not its fault.
    listed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NEREUS_PLUGINS": suite.plugin.name},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert listed.stdout.strip() == "[]", f"listing the adapter imported {listed.stdout.strip()}"


def test_name_is_a_lowercase_identifier(suite: Suite) -> None:
    """An adapter's name can be typed and used in a module, a table and a file name.

    If this fails, check AdapterDeclaration.name.
    """
    assert re.fullmatch(r"[a-z][a-z0-9_]*", suite.declaration.name)


def test_every_capability_is_declared(suite: Suite) -> None:
    """Each primitive on each kind of stage, and each feature, has an entry: silence is no answer.

    If this fails, check the tables in AdapterDeclaration.capabilities for the names listed.
    """
    missing = list(suite.capabilities.missing())
    assert not missing, f"capabilities without an entry: {', '.join(missing)}"


def test_unsupported_capabilities_give_a_reason(suite: Suite) -> None:
    """What cannot work says why.

    If this fails, check the texts given to unsupported().
    """
    silent = [
        n
        for n, s in _entries(suite.capabilities)
        if s.level is Level.UNSUPPORTED and not s.reason.strip()
    ]
    assert not silent, f"unsupported without a reason: {', '.join(silent)}"


def test_not_yet_capabilities_give_a_tracking_link(suite: Suite) -> None:
    """What could work and does not names where that is tracked.

    If this fails, check the arguments of not_yet().
    """
    silent = [
        n
        for n, s in _entries(suite.capabilities)
        if s.level is Level.NOT_YET and not (s.reason.strip() and s.tracking.strip())
    ]
    assert not silent, f"not yet without reason and tracking: {', '.join(silent)}"


def test_requirement_is_a_valid_specifier(suite: Suite) -> None:
    """The backend is named by a PEP 508 requirement with a version range.

    If this fails, check AdapterDeclaration.requirement.
    """
    if suite.declaration.requirement is None:
        pytest.skip("the adapter declares no backend")
    try:
        requirement = Requirement(suite.declaration.requirement)
    except InvalidRequirement as error:
        pytest.fail(f"{suite.declaration.requirement!r} is not PEP 508: {error}")
    assert str(requirement.specifier), f"{requirement} names no versions"


def test_missing_backend_raises_with_the_install_line(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating an adapter whose backend is absent says how to install it.

    If this fails, check AdapterDeclaration.requirement and install.
    """
    name = _backend(suite).name
    real = metadata.version

    def version(distribution: str) -> str:
        if distribution == name:
            raise metadata.PackageNotFoundError(name)
        return real(distribution)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(BackendMissing) as info:
        suite.registry.create(suite.declaration.name, object(), NereusConfig())
    line = suite.declaration.install or f"pip install '{suite.declaration.requirement}'"
    assert line in str(info.value)


def test_installed_backend_is_inside_the_requirement(suite: Suite) -> None:
    """The backend that the suite runs against is one the adapter says it supports.

    If this fails, check the environment or widen the requirement after running the real tier.
    """
    _backend(suite)
    status = backend_status(suite.declaration)
    assert status.state is State.READY, f"{status.state}: found {status.installed}; {status.todo}"


def test_foreign_handle_raises_wrong_handle(suite: Suite) -> None:
    """Attaching to something that is not the framework's job says what was expected.

    If this fails, check that nereus_create_adapter tests the type of its handle.
    """
    if suite.status.state is not State.READY:
        pytest.skip("the backend is not installed")
    with pytest.raises(WrongHandle):
        suite.registry.create(suite.declaration.name, object(), NereusConfig())
