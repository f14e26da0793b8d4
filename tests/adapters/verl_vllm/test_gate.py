"""verl's vLLM server leaves requests waiting when it begins to turn others away."""

import json
import subprocess
import sys

import pytest
from verl_cpu.command import environment

pytestmark = pytest.mark.real

LIMIT_S = 120
"""For a process that imports vLLM. Chosen, not measured."""


def test_requests_that_wait_at_a_server_that_leaves_are_turned_away(tmp_path, changes):
    env = environment(tmp_path, VERL_USE_EXTERNAL_MODULES="verl_cpu.platform", **changes)
    command = [sys.executable, "-m", "verl_cpu.parked"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "open": False,
        "waits": True,
        "forgotten": True,
        "closed": True,
        "parked": "aborted",
        "later": "aborted",
    }
