"""The journal: what it says after a crash, and what damage it tolerates or names."""

import os
from contextlib import closing

import pytest
from memory_adapter import MemoryAdapter, units_of
from plans import tiny_job

from nereus_core.acting import standing
from nereus_core.errors import NereusError
from nereus_core.events import EventLog, PrimitiveFinished
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import apply
from nereus_core.transition import Journal, JournalCorrupt, compile_transition, execute
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

JOB = tiny_job(4)
D = JOB.cluster.devices
ONE, TWO = Layout(1, 1), Layout(2, 1)


def plan(train):
    rest = Placement(ONE, ((D[3],),))
    return Plan({ACTOR_TRAIN: train, ACTOR_GENERATE: rest, REF_INFER: rest})


BEFORE = plan(Placement(TWO, ((D[0], D[1]),)))
AFTER = plan(Placement(ONE, ((D[0],), (D[1],), (D[2],), (D[3],))))
GRAPH = compile_transition(units_of(BEFORE), AFTER, JOB, prefix="t0")


def begun(path):
    journal = Journal(path)
    journal.begin(GRAPH, None)
    first = GRAPH.ops[0].op_id
    for phase in (Phase.PREPARE, Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT):
        journal.enter(first, phase)
    return journal


def test_what_was_begun_is_pending_for_the_next_controller(tmp_path):
    path, first = tmp_path / "run" / "journal.log", GRAPH.ops[0].op_id
    with closing(begun(path)) as journal:
        journal.done(first)
    with closing(Journal.open(path)) as again:
        pending = again.pending()
        assert pending.graph == GRAPH
        assert pending.phases == {first: Phase.COMMIT}
        assert pending.done == {first}
        assert pending.switched_to is None
        assert (again.epoch, again.num_begun) == (0, 1)
        assert again.serials == GRAPH.next_serials()
        assert again.switching(AFTER) == 1
    with closing(Journal(path)) as last:
        assert last.pending().switched_to == AFTER
        last.end("done")
        assert last.pending() is None
    with closing(Journal(path)) as quiet:
        assert quiet.pending() is None
        assert quiet.epoch == 1
    assert os.stat(path).st_mode & 0o077 == 0


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_last_line_cut_short_is_left_out_and_written_over(tmp_path, cut):
    path = tmp_path / "journal.log"
    begun(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])

    with closing(Journal(path)) as journal:
        assert journal.pending().phases == {GRAPH.ops[0].op_id: Phase.VERIFY}
        journal.enter(GRAPH.ops[0].op_id, Phase.COMMIT)

    assert path.read_bytes() == whole


def test_damage_in_the_middle_is_named_with_its_line(tmp_path):
    path = tmp_path / "journal.log"
    begun(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b"prepare", b"release"), *lines[3:]]))
    with pytest.raises(JournalCorrupt, match=r"journal.log line 3: its checksum does not match"):
        Journal(path)

    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(JournalCorrupt, match="line 3: it is numbered 3, so lines are missing"):
        Journal(path)


def test_another_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "journal.log"
    with monkeypatch.context() as patched:
        patched.setattr("nereus_core.transition.journal.VERSION", 99)
        Journal(path).close()
    with pytest.raises(NereusError, match=r"version 99.*reads version 1"):
        Journal(path)


def test_a_transition_is_one_epoch_and_phases_are_recorded_in_order(tmp_path):
    adapter, events = MemoryAdapter(JOB, BEFORE, with_state=True), []
    log = EventLog(None, lambda: 0.0)
    log.subscribe(lambda event, at_s: events.append(event))
    linked = []
    with closing(Journal(tmp_path / "journal.log")) as journal:
        relink, adapter.relink = adapter.relink, lambda plan: (linked.append(plan), relink(plan))
        outcome = execute(GRAPH, adapter, log=log, timeout_s=30, verify=True, journal=journal)
        assert (outcome.epoch, journal.epoch, journal.pending()) == (1, 1, None)
    assert linked == [outcome.plan]
    for event in events:
        if isinstance(event, PrimitiveFinished):
            assert list(event.phases_s) == [str(phase) for phase in Phase]


def test_standing_says_from_units_what_was_done():
    order = GRAPH.topological()
    units, done = GRAPH.units_before, set()
    assert standing(GRAPH, units, ()) == frozenset()
    for op in order:
        units = apply(op, units)
        assert standing(GRAPH, units, done) == done | {op.op_id}  # nothing recorded it yet
        done.add(op.op_id)
    lost = units.intact([D[0]])
    assert standing(GRAPH, lost, done) is None
