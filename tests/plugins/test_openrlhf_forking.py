"""Processes that a seat of OpenRLHF's engines has forked, without vLLM in them."""

import os
import signal
import subprocess
import sys
import time

import pytest

PARENT = """
import os, time
from nereus_adapters.openrlhf.forking import _Forks

os.environ["WHEN"] = "constructed"
forked = _Forks().Process(target={target}, args=({argument!r},), name="core")
os.environ["WHEN"] = "started"
forked.start()
print(forked.pid, flush=True)
forked.join({join_s})
"""


def parent(target, argument, join_s):
    source = PARENT.format(target=target, argument=argument, join_s=join_s)
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal on a parent's death")
def test_a_fork_ends_with_a_parent_that_was_killed_even_when_it_is_stopped():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(120)"
    with parent("exec", code, 120) as seat:
        cores = [int(seat.stdout.readline()) for _ in range(2)]  # its parent says it, and it
        core = cores[0]
        assert cores == [core, core]
        os.kill(core, signal.SIGSTOP)
        seat.kill()
    deadline_s = time.monotonic() + 20
    while runs(core) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    left = runs(core)
    if left:
        os.kill(core, signal.SIGKILL)
    assert not left


def test_a_fork_has_the_environment_of_the_moment_when_it_is_started(tmp_path):
    with parent("os.system", f"echo $WHEN > {tmp_path / 'when'}", 60) as seat:
        assert seat.wait(60) == 0
    assert (tmp_path / "when").read_text() == "started\n"
