"""What goes wrong in a real job ends in a named error, or the job goes on; nothing hangs."""

import pytest

from nereus_core.events import RunFinished, TransitionFinished

pytestmark = pytest.mark.real

FAST = (
    "+nereus.timeouts.step_s=240",
    "+nereus.timeouts.boundary_s=20",
    "+nereus.timeouts.primitive_s=180",
    "+nereus.backend.max_devices=4",
    "+nereus.policy.admission=never",
)


def outcome(job):
    *_, last = job.events
    assert isinstance(last, RunFinished)
    return last.outcome


def test_a_killed_rollout_server_ends_the_job_by_name(launch):
    job = launch("server", *FAST, env={"VERL_CPU_FAULT": "kill-server:1"}, steps=3)
    assert job.ran.returncode != 0
    assert outcome(job).startswith("failed: ")
    assert "hf_cpu_server" in job.ran.output or "waited 240 s for verl's step 2" in job.ran.output


def test_a_rank_killed_in_a_transition_ends_the_job_by_name(launch):
    plans = {1: {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp1", 4]}}
    job = launch(
        "rank", *FAST, plans=plans, ray_devices=4, env={"VERL_CPU_FAULT": "kill-rank"}, steps=3
    )
    assert job.ran.returncode != 0
    assert outcome(job).startswith("failed: StateLost: no intact copy of actor/train is left")
    first = next(event for event in job.events if isinstance(event, TransitionFinished))
    assert "ended (exit code None) during" in first.error


def test_ranks_that_cannot_meet_go_on_in_the_old_plan_and_a_hung_sync_ends_the_job(launch):
    plans = {1: {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp1", 4]}}
    job = launch(
        "meet",
        *FAST,
        plans=plans,
        ray_devices=4,
        env={"VERL_CPU_FAULT": "refuse-join,hang-sync:3"},
        steps=4,
    )
    (record,) = job.forced
    assert record["before"] == record["after"]
    assert record["world"] == 2
    (finished,) = [e for e in job.events if isinstance(e, TransitionFinished)]
    assert finished.outcome != "done"
    assert len(job.ran.metrics) == 2  # steps 1 and 2: the job went on as it was
    assert job.ran.returncode != 0
    assert outcome(job) == ("failed: WaitTimeout: waited 20 s for verl's weight synchronization 3.")
