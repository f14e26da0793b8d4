import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nereus_core.cli import app
from nereus_core.cli.outcome import exit_code_of
from nereus_core.errors import (
    BackendMissing,
    ConfigError,
    ModelConfigError,
    NoFeasiblePlan,
    NoSuchAdapter,
    WaitTimeout,
)
from nereus_core.events import read_events
from nereus_core.report.record import RunRecord

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip

SIM = """
adapter = "sim"
run_dir = "{run_dir}"
[job]
model = "TINY"
algorithm = "grpo"
steps = 12
global_batch = 16
response_tokens = [64, 64, 64, 256, 512, 900]
[job.plan]
"actor/generate" = "tp1pp1dp4"
"actor/train" = "tp2pp1dp2"
"ref/infer" = "tp1pp1dp2"
[backend]
devices_per_node = 4
events = [{{ step = 6, kill = ["node0:3"] }}, {{ step = 9, give = ["node0:3"] }}]
[policy]
cooldown_steps = 0
"""


def nereus(*arguments, **env):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", **env})


@pytest.fixture
def sim(shelf):
    """The simulated adapter through an entry point: the installed one, or one made here."""
    if not [p for p in entry_points(group="nereus") if p.name == "sim"]:
        info = shelf.folder / "nereus_checkout-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nereus-checkout\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[nereus]\nsim = nereus_adapters.sim\n")
    return shelf


@pytest.fixture
def config(tmp_path, sim):
    path = tmp_path / "nereus.toml"
    path.write_text(SIM.format(run_dir=(tmp_path / "run").as_posix()))
    return path


# --- How commands end -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("k", "p"), 2),
        (ModelConfigError("f", "p"), 2),
        (NoSuchAdapter("x", ["y"]), 2),
        (NoSuchAdapter("x", ["y"], ["z: ImportError"]), 2),
        (NoSuchAdapter("x", ["y"], ["z: ImportError", "x: ImportError"]), 3),
        (BackendMissing("x", "y", "z"), 3),
        (NoFeasiblePlan(4, "it is small"), 4),
        (WaitTimeout("x", 1.0), 1),
    ],
)
def test_errors_have_their_exit_codes(error, code):
    assert exit_code_of(error) == code


def test_an_error_is_one_block_on_stderr_and_nothing_on_stdout(tmp_path):
    ran = nereus("run", tmp_path / "absent.toml")
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert "ConfigError" in ran.stderr
    assert "cannot be read" in ran.stderr


def test_usage_errors_exit_with_2():
    assert nereus("run").exit_code == 2
    assert nereus("no-such-command").exit_code == 2
    assert nereus("run", "x.toml", "--steps", "0").exit_code == 2


def test_version():
    ran = nereus("--version")
    assert (ran.exit_code, ran.output.split()[0]) == (0, "nereus")


# --- adapters, doctor, conform ----------------------------------------------------------------


def test_adapters_lists_what_is_ready_missing_and_broken(shelf):
    shelf.adapter("ready")
    shelf.adapter("absent", requirement="no-such-dist>=1", install="pip install 'nereus[absent]'")
    shelf.put("acme", "1.0", acme="import libacme_that_is_not_there")
    ran = nereus("adapters", NEREUS_PLUGINS="ready,absent,acme")
    assert ran.exit_code == 0
    row = {line.split()[0]: line for line in ran.output.splitlines() if line.strip()}
    assert "ready" in row["ready"]
    assert row["ready"].count("TGI") == 4
    assert "missing" in row["absent"]
    assert "pip install 'nereus[absent]'" in ran.output
    assert "broken" in row["acme"]
    assert "No module named 'libacme_that_is_not_there'" in ran.output


def test_adapters_as_json(shelf):
    shelf.adapter("ready")
    shelf.put("acme", "1.0", acme="1 / 0")
    found = json.loads(nereus("adapters", "--json", NEREUS_PLUGINS="ready,acme").stdout)
    assert found["adapters"][0]["name"] == "ready"
    assert found["adapters"][0]["capabilities"]["split"]["train"] == {"level": "full"}
    assert found["broken"][0]["error"].startswith("ZeroDivisionError")


def test_doctor_stops_at_the_first_no_with_what_to_do(shelf):
    shelf.adapter("absent", requirement="no-such-dist>=1", install="pip install 'nereus[absent]'")
    ran = nereus("doctor", "absent", NEREUS_PLUGINS="absent")
    assert ran.exit_code == 3
    lines = ran.output.splitlines()
    assert lines[0].startswith("yes  entry point loads")
    assert lines[1].startswith("no   backend meets the requirement")
    assert lines[2].strip() == "-> pip install 'nereus[absent]'"
    assert len(lines) == 3


def test_doctor_reads_seams_and_names_the_one_that_is_gone(shelf):
    more = """
    import dataclasses
    from nereus_core.declaration import Seam
    declared = nereus_declare_adapter()
    @hookimpl
    def nereus_declare_adapter():
        seams = (Seam("json.decoder", "JSONDecoder.decode", ("self", "s")),
                 Seam("json.decoder", "JSONDecoder.decode_all"))
        return dataclasses.replace(declared, seams=seams)
    """
    shelf.adapter("seams", more=more)
    found = json.loads(nereus("doctor", "seams", "--json", NEREUS_PLUGINS="seams").stdout)
    assert [f["ok"] for f in found["findings"]] == [True, True, False]
    assert "class JSONDecoder has no decode_all" in found["findings"][-1]["answer"]


def test_doctor_of_a_healthy_adapter(shelf):
    shelf.adapter("healthy")
    ran = nereus("doctor", "healthy", NEREUS_PLUGINS="healthy")
    assert ran.exit_code == 0
    assert [line[:3] for line in ran.output.splitlines()] == ["yes"] * 4


def test_doctor_of_a_broken_and_of_an_unknown_adapter(shelf):
    shelf.put("acme", "1.0", acme="1 / 0")
    ran = nereus("doctor", "acme", NEREUS_PLUGINS="acme")
    assert ran.exit_code == 3
    assert "ZeroDivisionError" in ran.output
    assert "mend or reinstall acme 1.0" in ran.output
    assert nereus("doctor", "nobody", NEREUS_PLUGINS="acme").exit_code == 2


def test_conform_refuses_a_tier_without_a_harness(shelf):
    shelf.adapter("here")
    ran = nereus("conform", "here", "--tier", "gpu", NEREUS_PLUGINS="here")
    assert ran.exit_code == 2
    assert "adapter 'here' has no harness for 'gpu'; it has ['contract']" in ran.stderr


# --- plan -------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "config.json"


def test_plan_says_seconds_and_memory_of_a_feasible_plan(llama):
    arguments = ("plan", "--model", llama, "--nodes", 2, "--batch", 128, "--response", 1024)
    found = json.loads(nereus(*arguments, "--json").stdout)
    assert set(found["plan"]) == {"actor/generate", "actor/train", "ref/infer"}
    assert set(found["stage_s"]) == set(found["plan"])
    bounds = found["predicted_s"]
    assert 0 < bounds["low_s"] <= bounds["mean_s"] <= bounds["high_s"]
    assert 0 < max(found["memory_bytes"].values()) <= 0.9 * 80 * 2**30
    assert all(r["predicted_s"] is not None and r["reason"] for r in found["runner_ups"])
    assert (
        nereus(*arguments, "--json").stdout.partition('"search_s"')[0]
        == json.dumps(found, indent=2, ensure_ascii=False).partition('"search_s"')[0]
    )


def test_plan_for_people(llama):
    ran = nereus("plan", "-m", llama.parent, "--algorithm", "ppo", "--device", "h200-sxm")
    assert ran.exit_code == 0
    rows = {line.split()[0] for line in ran.output.splitlines() if "/" in line.split(" ")[0]}
    assert rows == {"actor/generate", "actor/train", "critic/infer", "critic/train", "ref/infer"}
    assert "per RL step" in ran.output
    assert "Runner-ups" in ran.output


def test_plan_that_fits_nowhere_exits_with_4(llama):
    ran = nereus("plan", "-m", llama, "--devices-per-node", 1, "--device", "cpu-seat")
    assert ran.exit_code == 4
    assert "no plan fits on 1 healthy devices" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--algorithm", "dpo"), "--algorithm: got 'dpo'; known: ppo, grpo, remax"),
        (("--device", "tpu"), "--device: no device 'tpu'; known: a100"),
        (("--precision", "int8"), "--precision: got 'int8'"),
        (("--inter", "string"), "--inter: no link 'string'; known: nvlink3"),
        (("--degrees", "odd"), "constraints.degrees: got 'odd'"),
    ],
)
def test_plan_names_an_option_that_cannot_be_used(llama, arguments, message):
    ran = nereus("plan", "-m", llama, *arguments)
    assert ran.exit_code == 2
    assert message in ran.stderr


def test_plan_names_the_field_that_a_model_lacks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": None}))
    ran = nereus("plan", "-m", tmp_path)
    assert ran.exit_code == 2
    assert "hidden_size" in ran.stderr


# --- run, explain, report ---------------------------------------------------------------------


def test_a_run_adapts_and_leaves_events_traces_and_a_report(config, tmp_path):
    ran = nereus("run", config, NEREUS_PLUGINS="sim")
    assert ran.exit_code == 0, ran.output
    run = RunRecord.read(tmp_path / "run" / "events.jsonl")
    assert [s.step for s in run.steps] == list(range(12))
    assert [c.lost for c in run.device_changes] == [("node0:3",), ()]
    assert any(d.path == "urgent" and d.admitted for d in run.decisions)
    done = [t for t in run.transitions if t.finished and t.finished.outcome == "done"]
    assert done
    used = {d for entry in run.plans[7].values() for unit in entry["units"] for d in unit}
    assert "node0:3" not in used
    assert (run.finished.outcome, run.finished.steps) == ("done", 12)
    # The simulated world brings its clock: steps and transitions lie within the run's seconds.
    assert sum(s.step_s for s in run.steps) + run.transition_s <= run.elapsed_s * (1 + 1e-9)
    lines = ran.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 12
    assert lines[-1] == str(tmp_path / "run" / "report.html")
    html = (tmp_path / "run" / "report.html").read_text()
    assert done[0].primitives[0].text in html.replace("&gt;", ">").replace("&#x27;", "'")
    traces = list((tmp_path / "run" / "traces").iterdir())
    assert len(traces) == len(run.transitions)
    assert os.stat(tmp_path / "run").st_mode & 0o077 == 0


def test_observe_changes_nothing_and_quiet_prints_one_line(config, tmp_path):
    ran = nereus("run", config, "--mode", "observe", "--steps", 5, "--run-dir", tmp_path / "other",
                 "-q", NEREUS_PLUGINS="sim")  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines() == [str(tmp_path / "other" / "report.html")]
    run = RunRecord.read(tmp_path / "other" / "events.jsonl")
    assert len(run.steps) == 5
    assert run.transitions == []
    assert run.started.mode == "observe"


def test_any_key_can_be_set_on_the_command_line(config, tmp_path):
    ran = nereus("run", config, "-q", "--set", "backend.events=[]", "--set", "mode=observe",
                 "--set", "job.steps=3", NEREUS_PLUGINS="sim")  # fmt: skip
    assert ran.exit_code == 0, ran.output
    run = RunRecord.read(tmp_path / "run" / "events.jsonl")
    assert (len(run.steps), run.device_changes, run.started.mode) == (3, [], "observe")
    # What is not named stays.
    assert run.plans[0]["actor/train"]["layout"] == "tp2pp1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy.delta", "--set: got 'policy.delta'; expected KEY=VALUE"),
        ("policy.dleta=1", "policy.dleta: unknown key. Did you mean 'delta'?"),
        ("policy..delta=1", "--set: 'policy..delta' is not a key"),
        ("policy.delta=much", "policy.delta: got 'much'"),
    ],
)
def test_an_assignment_that_cannot_be_used_is_named(config, text, message):
    ran = nereus("run", config, "--set", text, NEREUS_PLUGINS="sim")
    assert ran.exit_code == 2
    assert message in ran.stderr


def test_explain_prints_each_decision_from_its_record(config, tmp_path):
    nereus("run", config, "-q", NEREUS_PLUGINS="sim")
    events = tmp_path / "run" / "events.jsonl"
    run = RunRecord.read(events)
    ran = nereus("explain", events)
    assert ran.exit_code == 0
    for decision in run.decisions:
        if decision.path != "none":
            assert decision.rule in ran.stdout
    urgent = next(d for d in run.decisions if d.path == "urgent")
    only = nereus("explain", events, "--step", urgent.step).stdout
    assert urgent.rule in only
    assert f"Transition after step {urgent.step}: done" in only
    found = json.loads(nereus("explain", events, "--json", "--step", urgent.step).stdout)
    assert {d["step"] for d in found} == {urgent.step}
    assert all(d["signal"] and d["policy"] == "payback" for d in found)
    assert f"woken by   devices: {urgent.signal}" in only


def test_explain_of_a_step_without_a_decision_says_where_there_are_some(recorded):
    ran = nereus("explain", recorded, "--step", 99)
    assert ran.exit_code == 2
    assert "no decision after step 99; decisions follow steps 0 to 29" in ran.stderr


def test_report_compares_with_a_baseline(recorded, recorded_baseline, tmp_path):
    ran = nereus("report", recorded)
    assert ran.stdout.strip() == str(recorded.parent / "report.html")
    target = tmp_path / "compare.html"
    ran = nereus("report", recorded, "--baseline", recorded_baseline, "-o", target)
    assert ran.exit_code == 0
    assert "Against the baseline" in target.read_text()


def test_an_unknown_adapter_or_key_is_named_before_anything_starts(config, tmp_path):
    ran = nereus("run", config, "--adapter", "sym", NEREUS_PLUGINS="sim")
    assert ran.exit_code == 2
    assert "no adapter 'sym'; installed: sim" in ran.stderr
    ran = nereus("run", config, "--mode", "dream", NEREUS_PLUGINS="sim")
    assert ran.exit_code == 2
    assert "mode: got 'dream'" in ran.stderr
    config.write_text(config.read_text().replace("cooldown_steps", "cooldown"))
    ran = nereus("run", config, NEREUS_PLUGINS="sim")
    assert ran.exit_code == 2
    assert "Did you mean 'cooldown_steps'?" in ran.stderr
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_terminated_run_still_closes_and_reports(config, tmp_path):
    config.write_text(config.read_text().replace("steps = 12", "steps = 1000000"))
    path = os.pathsep.join([str(config.parent / "site"), *filter(None, sys.path)])
    child = subprocess.Popen(
        [sys.executable, "-m", "nereus_core.cli", "run", str(config)],
        env=os.environ | {"PYTHONPATH": path, "NEREUS_PLUGINS": "sim", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for line in child.stdout:
            if line.startswith("step 2 "):
                break
        child.send_signal(signal.SIGTERM)
        rest, error = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    assert child.returncode == 130, error
    assert "interrupted" in error
    assert rest.splitlines()[-1] == str(tmp_path / "run" / "report.html")
    run = RunRecord.of(read_events(Path(tmp_path / "run" / "events.jsonl")))
    assert run.finished.outcome == "interrupted"


FRAMEWORK = """
from nereus_core.hookspecs import hookimpl

@hookimpl
def nereus_frameworks():
    return ("acme",)

@hookimpl
def nereus_run_framework(name, keys, arguments):
    print(name, keys, arguments)
    return 3 if "--fail" in arguments else 0
"""


def test_a_framework_is_run_with_what_stands_behind_two_dashes(shelf):
    shelf.put("acme-run", acme=FRAMEWORK)
    shelf.registry("acme")
    found = nereus(
        "run", "--acme", "--mode", "advise", "--set", "policy.delta=0.1", "--", "--mode", "x", "y"
    )
    assert found.exit_code == 0, found.output
    keys = {"policy": {"delta": 0.1}, "mode": "advise"}
    assert found.stdout == f"acme {keys} {['--mode', 'x', 'y']}\n"
    assert nereus("run", "--acme", "--", "--fail").exit_code == 3


def test_of_the_words_before_two_dashes_only_an_option_names_a_framework(shelf):
    shelf.put("acme-run", acme=FRAMEWORK)
    shelf.registry("acme")
    found = nereus("run", "--adapter", "acme", "--acme", "--", "y")
    keys = {"adapter": "acme"}
    assert found.stdout == f"acme {keys} {['y']}\n"
    assert nereus("run", "--adapter", "acme", "--", "x").exit_code == 2  # CONFIG, and none there


def test_options_win_over_assignments_for_a_framework_as_for_a_job(shelf):
    shelf.put("acme-run", acme=FRAMEWORK)
    shelf.registry("acme")
    found = nereus("run", "--acme", "--mode", "advise", "--set", "mode='adapt'", "--", "y")
    keys = {"mode": "advise"}
    assert found.stdout == f"acme {keys} {['y']}\n"


@pytest.mark.parametrize("option", [("--resume", "x"), ("--steps", "3"), ("--quiet",)])
def test_what_a_framework_says_itself_is_no_option_beside_it(shelf, option):
    shelf.put("acme-run", acme=FRAMEWORK)
    shelf.registry("acme")
    found = nereus("run", "--acme", *option, "--", "y")
    assert found.exit_code == 2
    assert option[0] in found.output
    assert "not with a framework" in found.output


def test_two_plugins_that_run_one_framework_are_named(shelf):
    shelf.put("acme-run", acme=FRAMEWORK)
    shelf.put("acme-other", other=FRAMEWORK)
    shelf.registry("acme", "other")
    found = nereus("run", "--acme", "--", "y")
    assert found.exit_code == 3
    assert "framework 'acme' comes from both" in " ".join(found.output.split())


def test_a_framework_that_nobody_runs_is_a_wrong_option(shelf):
    shelf.put("acme-run", acme=FRAMEWORK)
    shelf.registry("acme")
    found = nereus("run", "--acne", "--", "x")
    assert found.exit_code == 2
    assert "--acne" in found.output
    assert "names no job" in nereus("run", "--mode", "advise").output
