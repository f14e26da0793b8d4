"""`nereus run` loses the last copy of a state, says what to do, and that command works."""

import shlex

import pytest
from typer.testing import CliRunner

from nereus_adapters.torch.harness import TINY_CONFIG
from nereus_core.cli import app
from nereus_core.report.record import RunRecord

pytestmark = pytest.mark.real

TOML = """
adapter = "torch"
run_dir = "{run_dir}"
[checkpoint]
every_steps = 1
[policy]
delta = 1000
[job]
model = {model}
precision = "float64"
steps = 4
prompts_per_step = 4
max_prompt_tokens = 8
max_response_tokens = 8
learning_rate = 1e-3
plan = {{ "actor/train" = "tp2pp1dp1" }}
[backend]
seats = 2
events = [{{ step = 1, kill = ["node0:1"] }}]
"""


def losses(run_dir):
    record = RunRecord.read(run_dir / "events.jsonl")
    return {s.step: s.metrics["actor/loss"] for s in record.steps}


def nereus(*words):
    return CliRunner().invoke(app, [str(w) for w in words], env={"COLUMNS": "400"})


def test_a_lost_state_is_resumed_by_the_command_that_the_error_gives(tmp_path):
    model = "{" + ", ".join(f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}"
                            for k, v in TINY_CONFIG.items()) + "}"  # fmt: skip
    config = tmp_path / "nereus.toml"
    config.write_text(TOML.format(run_dir=tmp_path / "run", model=model))
    fixed = ("--set", "backend.events=[]", "--mode", "observe", "--run-dir", tmp_path / "fixed")
    assert nereus("run", config, *fixed, "-q").exit_code == 0

    ran = nereus("run", config, "-q", "--set", "job.temperature=1.0")
    assert ran.exit_code != 0
    assert "no intact copy of actor/train is left" in ran.output
    command = shlex.split(ran.output.partition("Resume with: ")[2].splitlines()[0])
    assert command[:2] == ["nereus", "run"]
    assert command[-2:] == ["--resume", str(tmp_path / "run" / "checkpoints" / "step-00000001")]
    before = losses(tmp_path / "run")

    # The seat died right after step 1, before its checkpoint; and the device is gone for good.
    ran = nereus(*command[1:], "-q", "--set", "backend.seats=1", "--set", "backend.events=[]")
    assert ran.exit_code == 0, ran.output
    found = before | losses(tmp_path / "run")
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3]
    assert found == pytest.approx(losses(tmp_path / "fixed"), abs=1e-9)
