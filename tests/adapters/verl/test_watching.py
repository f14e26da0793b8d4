"""Mode advise on a real GRPO job: what a user sees first."""

import pytest

from nereus_core.events import Decided, RunFinished, RunStarted, StepObserved

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def job(jobs):
    found = jobs("fixed-grpo")
    assert found.ran.returncode == 0, found.ran.output[-4000:]
    return found


def told(job):
    return [line for line in job.ran.output.splitlines() if "[nereus]" in line]


def test_one_line_says_that_it_is_on_and_one_where_the_report_is(job):
    said = [line for line in told(job) if "advice" not in line]
    assert len(said) == 2, said
    assert "on: verl, mode advise (says what it would do, changes nothing)" in said[0]
    assert "actor/generate=tp1pp1dp2 actor/train=tp2pp1dp1" in said[0]
    assert "done; report in" in said[1]
    assert (job.work / "run" / "report.html").stat().st_size > 1000


def test_every_step_is_recorded_as_verl_itself_reports_it(job):
    started, *_, finished = job.events
    assert isinstance(started, RunStarted)
    assert (started.adapter, started.algorithm, started.global_batch) == ("verl", "grpo", 32)
    assert isinstance(finished, RunFinished)
    assert (finished.outcome, finished.transition_s) == ("done", 0.0)
    steps = [event for event in job.events if isinstance(event, StepObserved)]
    assert [step.step for step in steps] == list(range(len(job.ran.metrics)))
    for step, logged in zip(steps, job.ran.metrics, strict=True):
        assert step.response_tokens_mean == pytest.approx(logged["response_length/mean"])
        assert step.prompt_tokens_mean == pytest.approx(logged["prompt_length/mean"])
        assert step.stage_s["actor/generate"] == pytest.approx(logged["timing_s/gen"])
        trained_s = logged["timing_s/old_log_prob"] + logged["timing_s/update_actor"]
        assert step.stage_s["actor/train"] == pytest.approx(trained_s)
        assert step.metrics["actor/pg_loss"] == pytest.approx(logged["actor/pg_loss"])
        if not step.step:
            assert not step.peak_bytes  # no moments yet
            continue
        peak_bytes = logged["actor/perf/max_memory_allocated_gb"] * 2**30
        # A replica's weights, in float32, lie beside what the trainer's own process allocates.
        assert max(step.peak_bytes.values()) - 4 * 431_232 == pytest.approx(peak_bytes, rel=1e-6)
    for step, logged in list(zip(steps, job.ran.metrics, strict=True))[1:]:
        # From boundary to boundary: whatever verl does in a step, and what lies between two.
        assert step.step_s > logged["timing_s/gen"] + logged["timing_s/update_actor"]


def test_decisions_are_recorded_and_nothing_was_changed(job):
    decided = [event for event in job.events if isinstance(event, Decided)]
    assert decided
    assert all(event.current_plan == job.events[0].plan for event in decided)
    assert {metric["nereus/transitions"] for metric in job.ran.metrics} == {0.0}


def test_what_would_have_been_done_is_said_in_verls_own_words(job):
    decided = [event for event in job.events if isinstance(event, Decided) and event.admitted]
    advice = [line for line in told(job) if "advice after step" in line]
    assert advice
    assert len(advice) == len({str(event.candidate_plan) for event in decided})
    for line in advice:
        words = line.partition("; to start on it: ")[2].split()
        assert words
        assert {word.partition("=")[0] for word in words} <= {
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "trainer.n_gpus_per_node",
        }


def test_figures_reach_the_jobs_own_logger(job):
    last = job.ran.metrics[-1]
    assert last["nereus/actor_train/devices_per_unit"] == 2.0
    assert last["nereus/actor_generate/units"] == 2.0
    assert last["nereus/predicted_step_s"] > 0
    assert last["nereus/boundary_s"] > 0
