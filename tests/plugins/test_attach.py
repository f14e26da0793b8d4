import pytest

from nereus_core.errors import NoSuchAdapter, WrongHandle
from nereus_core.events import RunFinished, RunStarted, StepObserved, read_events
from nereus_plugins.attach import attach


def test_a_loop_of_ones_own_attaches_and_leaves_its_events(launched, tmp_path, settings):
    with attach(launched.handle, settings()) as nereus:
        while not launched.finished:
            launched.step()
            nereus.at_boundary()
    kinds = [type(event) for event, _ in read_events(tmp_path / "events.jsonl")]
    assert kinds[0] is RunStarted
    assert kinds.count(StepObserved) == 4
    assert kinds[-1] is RunFinished


def test_a_configuration_is_read_from_its_path(launched, tmp_path):
    path = tmp_path / "nereus.toml"
    path.write_text(f'adapter = "sim"\nenabled = false\nrun_dir = "{tmp_path.as_posix()}"\n')
    with attach(launched.handle, path) as nereus:
        launched.step()
        assert nereus.at_boundary() is None  # not enabled: it only observes
    (started, _), *_ = read_events(tmp_path / "events.jsonl")
    assert started.mode == "observe"


def test_a_loop_that_fails_is_recorded_and_its_error_goes_on(launched, tmp_path, settings):
    with pytest.raises(ZeroDivisionError), attach(launched.handle, settings()):
        _ = 1 / 0
    *_, (last, _) = read_events(tmp_path / "events.jsonl")
    assert last.outcome == "failed: ZeroDivisionError: division by zero"


def test_a_foreign_handle_and_an_absent_adapter_are_named(tmp_path, settings):
    with pytest.raises(WrongHandle, match="sim"), attach(object(), settings()):
        pass
    with (
        pytest.raises(NoSuchAdapter, match="sym"),
        attach(object(), settings(adapter="sym")),
    ):
        pass
