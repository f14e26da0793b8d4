"""What goes wrong in a real job ends in a named error, or the job goes on; nothing hangs.

Each fault strikes a job of the other tests, after the last step that they look at.
"""

import pytest

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real


def test_ranks_that_cannot_meet_go_on_in_the_old_plan(jobs):
    job = jobs("forced-grpo")
    refused, again = job.forced[3:]
    assert refused["before"] == refused["after"]
    assert (refused["world"], again["world"]) == (4, 2)
    outcomes = [e.outcome for e in job.events if isinstance(e, TransitionFinished)]
    assert [outcome == "done" for outcome in outcomes] == [True, True, True, False, True]
    assert job.series("nereus/transitions") == [1.0, 2.0, 3.0, 3.0, 4.0]


def test_a_weight_synchronization_that_hangs_ends_the_job_by_name(jobs):
    job = jobs("forced-grpo")
    assert job.ran.returncode != 0
    assert job.outcome == "failed: WaitTimeout: waited 60 s for verl's weight synchronization 6."


def test_a_killed_rollout_server_ends_the_job_by_name(jobs):
    job = jobs("fixed-ppo")
    assert job.ran.returncode != 0
    assert job.outcome.startswith("failed: ")
    assert "hf_cpu_server" in job.ran.output or "waited 300 s for verl's step 6" in job.ran.output


def test_a_rank_killed_in_a_transition_ends_the_job_by_name(jobs):
    job = jobs("forced-ppo")
    assert job.ran.returncode != 0
    assert job.outcome.startswith("failed: StateLost: no intact copy of actor/train is left")
    *_, last = [event for event in job.events if isinstance(event, TransitionFinished)]
    assert "ended (exit code None) during" in last.error
