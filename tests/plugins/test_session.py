import pytest

from nereus_core.errors import StateLost, WrongHandle
from nereus_core.events import RunFinished, StepObserved, read_events
from nereus_plugins.session import open_session


def test_a_trainer_gets_figures_at_every_boundary_and_a_report_at_the_end(
    launched, tmp_path, capsys, settings
):
    session = open_session("sim", launched.handle, settings(mode="advise"))
    figures = {}
    while not launched.finished:
        launched.step()
        figures = session.at_boundary()
    session.close()
    session.close()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("[nereus] on: sim, mode advise")
    assert "actor/train=tp1pp1dp2" in said[0]
    assert figures["nereus/actor_train/units"] == 2.0
    assert figures["nereus/decisions"] >= 1
    assert figures["nereus/transitions"] == 0
    assert all(name.startswith("nereus/") for name in figures)
    events = [event for event, _ in read_events(tmp_path / "events.jsonl")]
    assert sum(type(e) is StepObserved for e in events) == 4
    assert [e.outcome for e in events if type(e) is RunFinished] == ["done"]
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert session.at_boundary() == {}


@pytest.mark.parametrize("mode", ["observe", "advise", "adapt"])
def test_what_breaks_inside_ends_the_job_in_mode_adapt_alone(
    launched, tmp_path, capsys, mode, settings
):
    session = open_session("sim", launched.handle, settings(mode=mode))
    launched.step()
    launched.handle.seen = None  # the job's own reading is broken from here on
    if mode == "adapt":
        with pytest.raises(TypeError):
            session.at_boundary()
    else:
        assert session.at_boundary() == {}
        assert (
            "OFF for this sim job, which goes on without it. TypeError" in capsys.readouterr().err
        )
    *_, (last, _) = read_events(tmp_path / "events.jsonl")
    assert last.outcome.startswith("failed: TypeError")


def test_a_handle_that_is_no_job_leaves_nothing_behind(tmp_path, capsys, settings):
    with pytest.raises(WrongHandle):
        open_session("sim", object(), settings())
    assert "[nereus]" not in capsys.readouterr().err


def test_lost_state_is_told_with_what_a_framework_knows_of_its_checkpoints(
    launched, tmp_path, settings
):
    session = open_session("sim", launched.handle, settings(mode="adapt"))
    session.explain = lambda lost: StateLost(lost.stage, "ckpt/7")
    launched.step()
    assert session.lost == frozenset()
    gone = launched.handle.job.cluster.devices[:-1]
    for device in gone:
        launched.handle.fail(device)
    assert session.lost == session.controller.plan.devices & set(gone)
    with pytest.raises(StateLost, match="the newest checkpoint is ckpt/7"):
        session.at_boundary()
    assert session.lost == frozenset()  # it is closed
    *_, (last, _) = read_events(tmp_path / "events.jsonl")
    assert last.outcome.endswith("the newest checkpoint is ckpt/7.")


def test_what_would_be_done_is_said_in_the_frameworks_own_words_once(launched, capsys, settings):
    policy = {"admission": "saving>0"}
    session = open_session("sim", launched.handle, settings(mode="advise", policy=policy))
    asked = []

    def spell(current, wanted):
        asked.append((current, wanted))
        return "units=4"

    session.spell = spell
    while not launched.finished:
        launched.step()
        session.at_boundary()
    session.close()
    (current, wanted), *more = asked
    assert not [plan for _, plan in more if plan == wanted]
    assert current == session.controller.plan != wanted  # nothing was changed
    (said,) = [line for line in capsys.readouterr().err.splitlines() if str(wanted) in line]
    assert said == f"[nereus] advice after step 0: {wanted}; to start on it: units=4"


def test_seconds_spent_in_the_middle_of_a_step_are_told_at_the_next_boundary(
    launched, tmp_path, settings
):
    session = open_session("sim", launched.handle, settings(mode="adapt"))
    launched.step()
    assert session.at_boundary()["nereus/amid_step_s"] == 0.0
    lost = sorted(session.controller.plan.devices)[0]
    launched.handle.fail(lost)
    assert session.lost == {lost}
    session.amid_step()
    assert session.lost == frozenset()
    launched.step()
    figures = session.at_boundary()
    assert figures["nereus/amid_step_s"] > 0.0
    assert figures["nereus/transitions"] == 1.0
    launched.step()
    assert session.at_boundary()["nereus/amid_step_s"] == 0.0
    session.close()
