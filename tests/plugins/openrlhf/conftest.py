"""One model, one set of prompts and one stem of processes for all jobs of this folder."""

import subprocess
import sys
from pathlib import Path

import openrlhf_job
import pytest


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    subprocess.run([sys.executable, openrlhf_job.__file__, str(folder)], check=True, timeout=300)
    return folder


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Path:
    return openrlhf_job.make_recorded(tmp_path_factory.mktemp("recorded"), samples=2)


@pytest.fixture(scope="session", autouse=True)
def stem(tmp_path_factory):
    with openrlhf_job.stem(tmp_path_factory.mktemp("stem")):
        yield
