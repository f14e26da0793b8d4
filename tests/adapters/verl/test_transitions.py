"""Transitions of real jobs: the state is bit for bit the same, and the job learns as before."""

import pytest
from verl_cpu.alike import gaps, require_same_state

from nereus_core.events import PrimitiveFinished, TransitionFinished

pytestmark = pytest.mark.real

CASES = ["grpo", "ppo"]
STEPS = 5
"""That are compared; a fault ends the job in the sixth."""
WORLDS = {"grpo": [2, 4, 4, 2], "ppo": [2, 2, 4, 2]}
FAILING = {"grpo": 4, "ppo": 6}
"""After this step a fault strikes the transition (`test_faults`)."""


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture
def job(jobs, case):
    found = jobs(f"forced-{case}")
    assert len(found.forced) == 5, found.ran.output[-4000:]
    return found


@pytest.fixture
def done(job, case):
    """What was seen around each transition that was to succeed: one of each job is not."""
    return [r for r in job.forced if r["step"] != FAILING[case]]


@pytest.fixture
def fixed(jobs, case):
    return jobs(f"fixed-{case}")


def test_every_transition_was_done_and_the_ranks_are_those_asked_for(job, done, case):
    assert [record["world"] for record in done] == WORLDS[case]
    assert [record["beside"] for record in done] == [[n] * n for n in WORLDS[case]]
    assert all(record["admitted"] for record in done)
    outcomes = [event.outcome for event in job.events if isinstance(event, TransitionFinished)]
    assert outcomes.count("done") == 4
    assert job.series("nereus/transitions")[-1] == 4.0


def test_parameters_moments_and_schedules_are_the_same_bit_for_bit(done):
    for record in done:
        require_same_state(record)


def test_the_rollout_follows_the_actor_after_every_transition(job):
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6


def test_the_job_learns_what_the_fixed_job_learns(job, fixed, case, tolerance):
    """It strays no further than a few times as far as jobs that are never changed."""
    limits = tolerance(case)
    for trained in (fixed, job):
        assert min(trained.series("actor/grad_norm")) > 0.01  # there is something to learn from
    found = gaps(fixed.ran.metrics[:STEPS], job.ran.metrics[:STEPS], tuple(limits))
    print(f"the changed {case} job differs by {found}")
    strayed = {name: (gap, limits[name]) for name, gap in found.items() if gap > limits[name]}
    assert not strayed, f"(difference, allowed): {strayed}"


def test_state_crosses_once_and_shard_to_shard(job):
    finished = [event for event in job.events if isinstance(event, PrimitiveFinished)]
    extended = [e for e in finished if e.kind == "extend" and e.stage == "actor/train"]
    assert extended
    for event in extended:
        # Of each parameter: itself and two moments, in float32. A copy on new devices, no more.
        assert event.moved_bytes == 3 * 4 * 431_232
        assert event.kept_bytes == 0
