"""A transition left unfinished shows in `nereus explain` and `doctor`, read from its journal."""

import json
from contextlib import closing

from memory_adapter import units_of
from plans import tiny_job
from typer.testing import CliRunner

from nereus_core.cli import app
from nereus_core.events import EventLog, RunStarted
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.report.pending import explain_pending, pending_in
from nereus_core.transition import Journal, compile_transition
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

JOB = tiny_job(4)
D = JOB.cluster.devices
ONE = Layout(1, 1)


def plan(*train):
    rest = Placement(ONE, ((D[3],),))
    units = Placement(ONE, tuple((D[i],) for i in train))
    return Plan({ACTOR_TRAIN: units, ACTOR_GENERATE: rest, REF_INFER: rest})


GRAPH = compile_transition(units_of(plan(0)), plan(0, 1, 2), JOB, prefix="t4")


def nereus(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def test_what_is_pending_is_said_primitive_by_primitive(tmp_path):
    first, second = (op.op_id for op in GRAPH.ops)
    with closing(Journal(tmp_path / "journal.log")) as journal:
        assert pending_in(tmp_path) is None
        journal.begin(GRAPH, None)
        text = explain_pending(pending_in(tmp_path))
        assert "t4 was begun and has not ended" in text
        assert "0 of 2 primitives are done" in text
        assert text.count(": not begun") == 2
        assert "Nothing was committed: the old plan goes on." in text

        journal.enter(first, Phase.COMMIT)
        assert "--set backend.reattach=true" in explain_pending(pending_in(tmp_path))
        journal.done(first)
        journal.enter(second, Phase.TRANSFER)
        lines = explain_pending(pending_in(tmp_path)).splitlines()
        assert [line.rpartition(": ")[2] for line in lines[1:3]] == ["done", "in phase transfer"]

        journal.switching(plan(0, 1, 2))
        assert "links the new plan again" in explain_pending(pending_in(tmp_path))
        journal.end("done")
        assert pending_in(tmp_path) is None


def test_explain_and_doctor_read_it_and_leave_the_file_alone(tmp_path, shelf):
    shelf.adapter("healthy")
    with EventLog(tmp_path / "events.jsonl", lambda: 0.0) as log:
        log.emit(RunStarted("sim", "grpo", "adapt", plan(0).to_json(), tuple(map(str, D)), 8))
    path = tmp_path / "journal.log"
    with closing(Journal(path)) as journal:
        journal.begin(GRAPH, None)
    before = path.read_bytes()[:-3]  # a controller that died while it wrote
    path.write_bytes(before + b"\n00000000 {")
    torn = path.read_bytes()

    explained = nereus("explain", tmp_path / "events.jsonl")
    examined = nereus("doctor", "healthy", "--run", tmp_path, "--json")

    assert path.read_bytes() == torn
    assert explained.exit_code == 1
    assert "journal.log line 2: its checksum does not match" in explained.stderr
    found = json.loads(examined.stdout)
    assert not found["ok"]
    assert "its checksum does not match" in found["findings"][-1]["answer"]

    path.unlink()
    with closing(Journal(path)) as journal:
        journal.begin(GRAPH, None)
    path.write_bytes(path.read_bytes() + b"00000000 {")  # and this one in the last
    assert "Transition t4 was begun" in nereus("explain", tmp_path / "events.jsonl").stdout
    examined = nereus("doctor", "healthy", "--run", tmp_path)
    assert examined.exit_code == 3
    assert "t4 has not: 0 of 2 primitives are done" in examined.stdout

    path.unlink()
    assert nereus("doctor", "healthy", "--run", tmp_path).exit_code == 0
