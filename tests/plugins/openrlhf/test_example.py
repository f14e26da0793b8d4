"""The example is a job as a user has it: run as its script runs it, but as small as a CPU needs."""

import os
import shutil
import subprocess
from pathlib import Path

import openrlhf_job
import pytest

from nereus_core.events import RunFinished, RunStarted, read_events

pytestmark = pytest.mark.real

EXAMPLE = Path(__file__).parents[3] / "examples" / "openrlhf_ppo"
ON_A_CPU = {
    "data.max_len": 128,
    "data.max_samples": 16,
    "rollout.max_new_tokens": 16,
    "rollout.batch_size": 8,
    "rollout.n_samples_per_prompt": 2,
    "train.batch_size": 16,
    "vllm.sync_backend": "gloo",
    "vllm.gpu_memory_utilization": 0.05,
    "ds.attn_implementation": "eager",
}
"""Flags that come after the script's own, and win."""


@pytest.fixture
def launched(assets, tmp_path):
    """Say what a script that runs ``python`` gives it."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)

    def say(*more, **environment):
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        told = subprocess.run(
            [folder / "train.sh", *more],
            env=os.environ | {"PATH": path, "MODEL": str(assets / "model")} | environment,
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return told.stdout.split("\0")[:-1]

    return folder, say


def test_one_line_makes_it_a_job_under_nereus_which_it_then_is(launched, tmp_path):
    folder, say = launched
    flags = [word for key, value in ON_A_CPU.items() for word in (f"--{key}", str(value))]
    flags.append("--vllm.enforce_eager")
    alone, under = say(*flags), say(*flags, NEREUS="1")
    assert alone[:2] == ["-m", "openrlhf.cli.train_ppo_ray"]
    own = ["--nereus.enable", "--nereus.config", "nereus.toml"]
    assert under[:5] == ["-m", "nereus_plugins.openrlhf", *own]
    assert under[5:] == alone[2:]
    ran = openrlhf_job.run(under[2:], folder, module=under[1])
    assert ran.code == 0, ran.output[-6000:]
    assert [step["step"] for step in ran.steps()] == [1.0, 2.0]
    events = [e for e, _ in read_events(folder / "runs" / "openrlhf_ppo" / "events.jsonl")]
    assert isinstance(events[0], RunStarted)
    assert len(events[0].plan) == 4
    assert isinstance(events[-1], RunFinished)
    assert events[-1].outcome == "done"
