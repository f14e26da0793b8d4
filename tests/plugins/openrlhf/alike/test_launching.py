"""The ways in which a job is started: `nereus run --openrlhf`, and a Ray that runs already."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import openrlhf_job
import pytest

from nereus_core.events import RunFinished, RunStarted, read_events

pytestmark = pytest.mark.real

RAY = Path(sys.executable).parent / "ray"
SMALL = {
    "data__max_samples": 8,
    "algo__kl__init_coef": 0,
    "algo__kl__use_loss": False,
    "logger__tensorboard_dir": None,
}
"""A job of one step, one engine and one rank."""


def ended_well(folder):
    events = [event for event, _ in read_events(folder / "events.jsonl")]
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunFinished)
    assert events[-1].outcome == "done"
    assert (folder / "report.html").exists()


def answered(address):
    """Return what Ray's dashboard answers; None while it does not: a busy one drops connections."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return json.load(answer) if answer.status == 200 else None
    except OSError:
        return None


def ended(job, within_s=420):
    """Wait until a submitted job has ended; returns how, and what it wrote."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        told = answered(job)
        if told and told["status"] in ("SUCCEEDED", "FAILED", "STOPPED"):
            written = answered(f"{job}/logs")
            if written is not None:
                return told["status"], written["logs"]
        time.sleep(0.5)
    raise AssertionError(f"{job} has not ended within {within_s} s: {told}")


@contextlib.contextmanager
def cluster(folder):
    """Run a Ray of its own with its dashboard; yields (address of its GCS, address of its jobs)."""
    short = tempfile.mkdtemp(prefix="orl")
    ports = openrlhf_job.free_ports(4)
    environment = openrlhf_job.environment(folder, 8)
    environment.pop("OPENRLHF_TEST_STEM", None)  # its workers belong to several jobs
    with (folder / "ray.log").open("w", encoding="utf-8") as log:
        head = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1",
             f"--port={ports[0]}", f"--dashboard-port={ports[1]}",
             f"--dashboard-agent-listen-port={ports[2]}", f"--ray-client-server-port={ports[3]}",
             "--min-worker-port=0", "--max-worker-port=0", "--num-cpus=16", "--num-gpus=8",
             f"--object-store-memory={300 * 2**20}", f"--temp-dir={short}",
             "--disable-usage-stats"],
            stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder,
            start_new_session=True, preexec_fn=openrlhf_job.die_with_parent,
        )  # fmt: skip
    try:
        jobs = f"http://127.0.0.1:{ports[1]}"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if answered(f"{jobs}/api/jobs/") is not None:
                break
            assert head.poll() is None, (folder / "ray.log").read_text()[-2000:]
            time.sleep(0.2)
        else:
            raise AssertionError("Ray's dashboard has not come up within 120 s")
        yield f"127.0.0.1:{ports[0]}", jobs
    finally:
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(short, ignore_errors=True)


def test_nereus_run_takes_flags_behind_two_dashes(assets, tmp_path):
    words = ["run", "--openrlhf", "--mode", "observe", "--run-dir", str(tmp_path / "run"), "--"]
    words += openrlhf_job.flags(assets, tmp_path, **SMALL)
    ran = openrlhf_job.run(words, tmp_path, module="nereus_core.cli")
    assert ran.code == 0, ran.output[-4000:]
    assert "[nereus] on: openrlhf, mode observe (records only)" in ran.output
    assert len(ran.steps()) == 1
    ended_well(tmp_path / "run")


def test_a_job_that_is_submitted_to_a_running_ray_is_watched(assets, tmp_path):
    """Its files come with it: --nereus.config and the reward are found in the working directory."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "nereus.toml").write_text(f'mode = "observe"\nrun_dir = "{tmp_path / "run"}"\n')
    shutil.copy(assets / "reward.py", folder / "reward.py")
    words = ["--nereus.enable", "--nereus.config", "nereus.toml"]
    words += openrlhf_job.flags(assets, tmp_path, **SMALL | {"reward__remote_url": "reward.py"})
    with cluster(tmp_path) as (address, jobs):
        submitted = subprocess.run(
            [RAY, "job", "submit", "--address", jobs, "--working-dir", str(folder), "--no-wait",
             "--submission-id", "watched", "--",
             sys.executable, "-m", "nereus_plugins.openrlhf", *words],
            env=openrlhf_job.environment(tmp_path, 8) | {"RAY_ADDRESS": address},
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stdout[-6000:] + submitted.stderr[-2000:]
        how, output = ended(f"{jobs}/api/jobs/watched")
    assert how == "SUCCEEDED", output[-6000:]
    assert "[nereus] on: openrlhf, mode observe (records only)" in output
    ended_well(tmp_path / "run")
