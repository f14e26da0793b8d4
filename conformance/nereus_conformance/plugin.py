"""The pytest plugin: options, and nothing else until ``--adapter`` is given.

It is loaded by every pytest run in an environment that has nereus, so it imports pytest alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_CASES = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("nereus conformance", "hold an adapter to the contract of nereus")
    group.addoption("--adapter", metavar="NAME", help="the adapter to hold to it")
    group.addoption(
        "--tier",
        default="contract",
        choices=("contract", "real", "gpu"),
        help="over what: a simulated world, the framework on CPU, or on accelerators",
    )
    group.addoption(
        "--harness",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option of the adapter's harness, e.g. pool=ray",
    )
    group.addoption("--conformance-report", metavar="FILE", help="write a JSON report to FILE")
    group.addoption("--trials", type=int, default=8, help="transitions with a fault; 8 by default")
    group.addoption("--seed", type=int, default=0, help="seed of random orders and walks")


def pytest_configure(config: pytest.Config) -> None:
    """Start the suite's own plugins when it is asked for."""
    config.addinivalue_line(
        "markers", "needs(*capabilities, stage=): primitives and features that a case exercises"
    )
    if config.getoption("--adapter") is not None:
        from nereus_conformance import fixtures
        from nereus_conformance.suite import Suite

        config.pluginmanager.register(Suite.of(config), "nereus conformance suite")
        config.pluginmanager.register(fixtures, "nereus conformance fixtures")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the cases alone when there is nothing to hold to them."""
    if config.getoption("--adapter") is None and _CASES in collection_path.parents:
        return True
    return None
