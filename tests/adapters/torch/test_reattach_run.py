"""`nereus run` is killed in a transition; the next one takes over, and nothing is lost."""

import os
import re
import subprocess
import sys

import pytest

from nereus_adapters.torch.harness import TINY_CONFIG
from nereus_core.events import Recovered, read_events
from nereus_core.report.record import RunRecord

pytestmark = pytest.mark.real

TASK = '''
"""The task of the job; one that is to, kills its driver as soon as a transition moves state."""
import os, signal, sys, threading
from pathlib import Path
from nereus_adapters.torch.rl.tasks import CopyTask

def make(tokenizer, vocab, seed, prompts, journal=None):
    if journal is not None:
        threading.Thread(target=watch, args=(Path(journal),), daemon=True).start()
    return CopyTask(vocab, seed, prompts, (4, 8), 8)

def watch(journal):
    while not (journal.exists() and b'"transfer"' in journal.read_bytes()):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
'''

TOML = """
adapter = "torch"
run_dir = "{run_dir}"
[constraints]
min_dp = {{ "actor/train" = 2 }}
[job]
model = {model}
precision = "float64"
steps = 4
prompts_per_step = 4
max_prompt_tokens = 8
max_response_tokens = 8
learning_rate = 1e-3
task = "killing_task:make"
task_args = {{ vocab = 101, seed = 0, prompts = 4 }}
plan = {{ "actor/train" = "tp2pp1dp1" }}
[backend]
seats = 2
"""


def nereus(tmp_path, *words):
    """Run the command; returns its exit code and stderr.

    Not by a pipe: seats that outlive their driver would hold it open.
    """
    with (tmp_path / "stderr").open("w+") as stderr:
        ran = subprocess.run(
            [sys.executable, "-m", "nereus_core.cli", "run", *map(str, words), "-q"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            timeout=240,
            check=False,
        )
        stderr.seek(0)
        return ran.returncode, stderr.read()


def losses(run_dir):
    return {s.step: s.metrics["actor/loss"] for s in RunRecord.read(run_dir / "events.jsonl").steps}


def test_a_run_that_was_killed_in_a_transition_is_taken_over(tmp_path):
    model = "{" + ", ".join(f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}"
                            for k, v in TINY_CONFIG.items()) + "}"  # fmt: skip
    (tmp_path / "killing_task.py").write_text(TASK)
    config, run_dir = tmp_path / "nereus.toml", tmp_path / "run"
    config.write_text(TOML.format(run_dir=run_dir, model=model))
    code, said = nereus(tmp_path, config, "--mode", "observe", "--run-dir", tmp_path / "fixed")
    assert code == 0, said

    journal = f"job.task_args.journal='{run_dir / 'journal.log'}'"
    code, said = nereus(tmp_path, config, "--set", journal)
    assert code == -9, said
    found = losses(run_dir)
    assert 0 < len(found) < 4

    reattach = (config, "--set", "backend.reattach=true")
    code, said = nereus(tmp_path, *reattach)
    assert code == 0, said
    found |= losses(run_dir)
    assert found == pytest.approx(losses(tmp_path / "fixed"), abs=1e-9)
    events = [event for event, _ in read_events(run_dir / "events.jsonl")]
    assert sum(isinstance(e, Recovered) for e in events) == 1

    code, said = nereus(tmp_path, *reattach)
    assert code == 2
    assert re.search(r"backend\.reattach: .* has left no seats", said)
