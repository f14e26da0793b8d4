"""Four peer processes, started once for the whole folder."""

import sys
from pathlib import Path

import pytest

# Peers are spawned and import this module by name; so do the tests.
sys.path.insert(0, str(Path(__file__).parent))

import engine_peers
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def peers():
    with engine_peers.Peers(4) as started:
        yield started
