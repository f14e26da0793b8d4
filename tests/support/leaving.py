"""Kill a driver whose engine serves, and see what is left of it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cycles

DRIVER = Path(__file__).with_name("leaving_driver.py")


def require_nothing_left(engine, how):
    """Start a driver, kill it, and require that processes, shared memory and files go.

    Args:
        engine: ``vllm``, ``async`` (vLLM's AsyncLLM) or ``sglang``.
        how: a signal for the driver alone, or ``group``: SIGTERM to its whole process group, as
            a terminal that closes or `timeout` ends a job.
    """
    with tempfile.TemporaryDirectory(prefix="leaving-") as folder:  # short: sockets lie in it
        _require_nothing_left(engine, how, Path(folder))


def _require_nothing_left(engine, how, folder):
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )
    try:
        assert driver.stdout.readline() == b"ready\n"
        pids = cycles.below(driver.pid)
        mapped = cycles.shared(pids)
        assert len(pids) >= 3  # a stem and two ranks, at least
        if how == "group":
            os.killpg(driver.pid, signal.SIGTERM)
        else:
            driver.send_signal(how)
        driver.communicate(timeout=30)
        deadline_s = time.monotonic() + 30
        while left := [pid for pid in pids if _runs(pid)]:
            assert time.monotonic() < deadline_s, f"processes {left} still run"
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.communicate(timeout=30)
    assert not [path for path in mapped if path.exists()]
    own = ("model-", "torchinductor_")  # of the driver, and the cache of torch
    assert not [path for path in folder.iterdir() if not path.name.startswith(own)]


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
