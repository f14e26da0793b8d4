import dataclasses
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_core.errors import NereusError
from nereus_core.events import (
    Decided,
    DevicesChanged,
    Event,
    EventLog,
    InputIgnored,
    PrimitiveFinished,
    Recovered,
    RunFinished,
    RunStarted,
    StepObserved,
    TransitionFinished,
    TransitionStarted,
    from_json,
    read_events,
    to_json,
)

words = st.text(max_size=12)
figures = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**53)
names = st.tuples(words) | st.just(())
plans = st.dictionaries(words, st.dictionaries(words, words, max_size=2), max_size=2)
records = st.lists(plans, max_size=2).map(tuple)
maybe = st.none() | figures

ANY = {
    RunStarted: st.builds(RunStarted, words, words, words, plans, names, counts),
    StepObserved: st.builds(
        StepObserved, counts, figures, maybe, st.dictionaries(words, figures), figures, figures,
        figures, st.dictionaries(words, counts), names, st.dictionaries(words, figures),
    ),
    Decided: st.builds(
        Decided, counts, words, words, st.booleans(), words, plans, st.none() | plans, maybe, maybe,
        maybe, maybe, maybe, figures, records,
    ),
    TransitionStarted: st.builds(TransitionStarted, words, counts, records, records),
    PrimitiveFinished: st.builds(
        PrimitiveFinished, words, words, words, words, words, names, figures, figures, counts,
        counts, maybe, st.none() | words,
    ),
    TransitionFinished: st.builds(
        TransitionFinished, words, counts, words, figures, figures, counts, plans,
        st.none() | words,
    ),
    Recovered: st.builds(Recovered, counts, words, words, plans),
    DevicesChanged: st.builds(DevicesChanged, counts, names, names, names),
    InputIgnored: st.builds(InputIgnored, counts, words, words, words, counts),
    RunFinished: st.builds(RunFinished, counts, words, figures, figures),
}  # fmt: skip


def test_every_kind_of_event_is_drawn():
    assert set(ANY) == set(Event.__args__)


@pytest.mark.parametrize("kind", ANY, ids=lambda k: k.__name__)
@given(data=st.data())
def test_any_event_survives_json(kind, data):
    event = data.draw(ANY[kind])
    record = json.loads(json.dumps(to_json(event, 1.25)))
    assert record["event"] == kind.__name__
    assert from_json(record) == (event, 1.25)


def finished(step: int) -> RunFinished:
    return RunFinished(step, "finished", 1.0, 0.0)


def test_a_log_is_read_back_in_order_with_its_times(tmp_path):
    path, times = tmp_path / "deep" / "events.jsonl", iter([100.0, 100.5, 102.0])
    with EventLog(path, lambda: next(times)) as log:
        log.emit(finished(0))
        log.emit(finished(1))
    assert list(read_events(path)) == [(finished(0), 0.5), (finished(1), 2.0)]


@given(st.integers(1, 200))
def test_a_last_line_cut_anywhere_is_left_out(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "events.jsonl"
    lines = [json.dumps(to_json(finished(i), 0.0)) + "\n" for i in range(2)]
    path.write_text(lines[0] + lines[1][: -min(cut, len(lines[1]) - 1)])
    assert [e for e, _ in read_events(path)] == [finished(0)]


def test_events_are_on_disk_before_emit_returns(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", lambda: 0.0)
    log.emit(finished(3))
    assert [e for e, _ in read_events(tmp_path / "events.jsonl")] == [finished(3)]
    log.close()


def test_listeners_hear_what_is_emitted_also_after_closing():
    heard, log = [], EventLog(None, lambda: 7.0)
    log.subscribe(lambda event, at_s: heard.append((event, at_s)))
    log.emit(finished(0))
    log.close()
    log.emit(finished(1))
    assert heard == [(finished(0), 0.0), (finished(1), 0.0)]


def test_threads_never_tear_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, lambda: 0.0) as log:
        threads = [
            threading.Thread(target=lambda n=n: [log.emit(finished(n * 50 + i)) for i in range(50)])
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
    assert sorted(e.steps for e, _ in read_events(path)) == list(range(400))


def test_a_line_that_is_not_json_is_named(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(to_json(finished(0), 0.0)) + "\nnot json\n")
    with pytest.raises(NereusError, match=r"events\.jsonl:2 is not JSON"):
        list(read_events(path))


def test_an_unknown_event_lists_the_known_ones():
    with pytest.raises(NereusError, match="unknown event kind 'RunPaused'; known: RunStarted"):
        from_json({"event": "RunPaused"})


def test_a_field_of_a_newer_writer_is_left_and_a_missing_one_named():
    record = to_json(finished(2), 0.0)
    assert from_json(record | {"color": "blue"})[0] == finished(2)
    del record["outcome"]
    with pytest.raises(NereusError, match=r"RunFinished is incomplete.*outcome"):
        from_json(record)


@pytest.mark.parametrize("kind", ANY, ids=lambda k: k.__name__)
def test_no_field_takes_a_name_that_the_record_itself_uses(kind):
    assert not {f.name for f in dataclasses.fields(kind)} & {"event", "at_s"}
