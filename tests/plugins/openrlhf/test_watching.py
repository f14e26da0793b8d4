"""Real `train_ppo_ray` jobs that Nereus watches: what it records, and that it changes nothing."""

import openrlhf_job
import pytest

from nereus_core.events import (
    Decided,
    RunFinished,
    RunStarted,
    StepObserved,
    TransitionStarted,
    read_events,
)
from nereus_core.plan import Plan
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

pytestmark = pytest.mark.real


def test_a_job_is_recorded_step_by_step_and_advised(assets, tmp_path):
    boards = tmp_path / "boards"
    words = ["--nereus.enable", "--nereus.mode", "advise", f"--nereus.run_dir={tmp_path / 'run'}"]
    words += openrlhf_job.flags(
        assets,
        tmp_path,
        actor__num_gpus_per_node=2,
        logger__tensorboard_dir=boards,
        data__max_samples=32,
    )
    ran = openrlhf_job.run(words, tmp_path)
    assert ran.code == 0, ran.output[-4000:]
    events = [event for event, _ in read_events(tmp_path / "run" / "events.jsonl")]
    assert "[nereus] on: openrlhf, mode advise (says what it would do" in ran.output
    started, *_, finished = events
    assert isinstance(started, RunStarted)
    assert str(Plan.from_json(started.plan)) == (
        "actor/generate=tp1pp1dp1 actor/train=tp1pp1dp2 ref/infer=tp1pp1dp1"
    )
    assert isinstance(finished, RunFinished)
    assert finished.outcome == "done"
    seen = [event for event in events if isinstance(event, StepObserved)]
    logged = ran.steps()
    assert [event.step for event in seen] == [0, 1, 2, 3]
    assert any(isinstance(event, Decided) for event in events)
    assert not any(isinstance(event, TransitionStarted) for event in events)
    for event, step in zip(seen, logged, strict=True):
        assert set(event.stage_s) == {str(s) for s in (ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER)}
        assert event.step_s == pytest.approx(step["timing/step_total"])
        assert event.stage_s["actor/generate"] == pytest.approx(step["timing/generation"])
        assert 0 < event.stage_s["actor/train"] < event.step_s
        assert event.response_tokens_mean == pytest.approx(step["rollout/response_length_mean"])
        assert event.metrics["policy_loss"] == pytest.approx(step["policy_loss"])
    assert (tmp_path / "run" / "report.html").exists()
    # the figures of the first boundary are among the second step's in the job's own board
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (written,) = boards.iterdir()
    board = EventAccumulator(str(written))
    board.Reload()
    assert [p.step for p in board.Scalars("train/nereus/predicted_step_s")] == [2, 3, 4]
    assert board.Scalars("train/nereus/actor_train/units")[0].value == 2


def test_what_nereus_cannot_read_costs_a_warning_and_not_the_job(assets, tmp_path):
    words = ["--nereus.enable", "--nereus.mode=observe", f"--nereus.run_dir={tmp_path / 'run'}",
             "--nereus.backend.device_spec=abacus"]  # fmt: skip
    words += openrlhf_job.flags(
        assets, tmp_path, data__max_samples=8, algo__kl__init_coef=0, algo__kl__use_loss=False
    )
    ran = openrlhf_job.run(words, tmp_path)
    assert ran.code == 0, ran.output[-4000:]
    assert "[nereus] WARNING: OFF for this openrlhf job, which goes on without it" in ran.output
    assert "'abacus' is unknown" in ran.output
    assert len(ran.steps()) == 1


def test_a_seam_that_is_gone_ends_it_before_ray_starts(assets, tmp_path):
    gone = (
        "import nereus_core.seams as seams\n"
        "import pathlib, openrlhf\n"
        "real = seams.source_of\n"
        f"copy = pathlib.Path({str(tmp_path / 'ppo_trainer.py')!r})\n"
        "def source_of(module):\n"
        "    found = real(module)\n"
        "    if module == 'openrlhf.trainer.ppo_trainer':\n"
        "        copy.write_text(found.read_text().replace('def train_step', 'def train_once'))\n"
        "        return copy\n"
        "    return found\n"
        "seams.source_of = source_of\n"
    )
    words = ["--nereus.enable", *openrlhf_job.flags(assets, tmp_path)]
    ran = openrlhf_job.run(words, tmp_path, code=gone, timeout_s=120)
    assert ran.code == 2
    assert "SeamBroken: seam openrlhf.trainer.ppo_trainer:BasePPOTrainer.train_step" in ran.output
    assert "PolicyModelActor" not in ran.output
