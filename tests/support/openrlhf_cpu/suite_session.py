"""A pytest plugin for the conformance suite over OpenRLHF: one stem for the session's processes.

    PYTHONPATH=tests/support/openrlhf_cpu:tests/support OPENRLHF_ON_CPU=1 \\
        pytest -p suite_session --pyargs nereus_conformance --adapter=openrlhf --tier=real
"""

import os
import secrets
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import openrlhf_job
import pytest

_open = ExitStack()


def pytest_configure(config):
    folder = Path(tempfile.mkdtemp(prefix="openrlhf-suite-"))
    _open.callback(shutil.rmtree, folder, ignore_errors=True)
    shared = f"orl{secrets.token_hex(3)}"
    _open.callback(_forget, shared)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray refuses one that is empty
    os.environ.update(openrlhf_job.environment(folder, 4) | {"OPENRLHF_TEST_SHM": shared})
    _open.enter_context(openrlhf_job.stem(folder))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    _open.close()


def _forget(shared):
    for left in Path("/dev/shm").glob(f"{shared}*"):  # of engines that were killed
        left.unlink(missing_ok=True)
