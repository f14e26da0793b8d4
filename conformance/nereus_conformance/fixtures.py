"""Fixtures of the cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.suite import Suite
from nereus_core.harness import Harness


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Suite:
    """Which adapter is held to what."""
    found = request.config.pluginmanager.get_plugin("nereus conformance suite")
    assert isinstance(found, Suite)  # registered by our own plugin
    return found


@pytest.fixture(scope="session")
def harness(suite: Suite) -> Iterator[Harness]:
    """The adapter's harness, one for the run."""
    opened = suite.harness()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def num_trials(request: pytest.FixtureRequest) -> int:
    """How many transitions with a fault are tried."""
    return int(request.config.getoption("--trials"))


@pytest.fixture(scope="session")
def arrange(suite: Suite, harness: Harness) -> Arranger:
    """Launch a job: ``arrange(Stage.TRAIN, Layout(2, 1), num_units=1, spare=1)``."""
    return Arranger(suite, harness)
