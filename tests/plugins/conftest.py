"""A small simulated job, and settings that leave what they leave in the test's own folder."""

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from nereus_core.config import NereusConfig
from nereus_core.launched import Launched
from nereus_core.registry import Registry

STEPS = 4


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., NereusConfig]:
    """``settings(**changes)``: of a job on the sim adapter."""
    if not [p for p in entry_points(group="nereus") if p.name == "sim"]:
        pytest.skip("adapters are found by their entry points: install the project")
    job = {"steps": STEPS, "plan": {"actor/train": "tp1pp1dp2"}}
    return lambda **changes: NereusConfig.of(
        {"adapter": "sim", "run_dir": tmp_path, "job": job} | changes
    )


@pytest.fixture
def launched(settings: Callable[..., NereusConfig]) -> Iterator[Launched]:
    """The job, ready to be stepped."""
    running = Registry.load().launch("sim", settings())
    yield running
    running.close()
