"""Rollouts of vLLM's change their layout in a real job, which learns what it learns without."""

import pytest
from verl_cpu.alike import allowed, gaps
from verl_cpu.job import COMPARED
from verl_cpu.ulps import MOST

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real


@pytest.fixture
def changed(jobs):
    found = jobs("changed")
    assert found.ran.returncode == 0, found.ran.output[-4000:]
    return found


def test_every_transition_commits_and_the_job_ends_well(changed):
    outcomes = [e.outcome for e in changed.events if isinstance(e, TransitionFinished)]
    assert outcomes == ["done"] * 3
    assert all(record["admitted"] for record in changed.forced)
    assert [len(record["served"]) for record in changed.forced] == [2, 1, 2]
    assert [len(record["serve"]) for record in changed.forced] == [1, 2, 1]
    assert len(changed.ran.metrics) == COMPARED + 1
    assert changed.series("nereus/transitions", COMPARED + 1)[-1] == 3.0


def test_parameters_and_moments_are_the_same_bit_for_bit(changed):
    for record in changed.forced:
        assert record["before"] == record["after"], f"after step {record['step']}"
        slots = {name.split("/")[1] for name in record["before"]}
        assert {"param", "exp_avg", "exp_avg_sq", "step", "lr_scheduler"} <= slots


def test_the_rollout_follows_the_actor_after_every_transition(changed):
    by_token = changed.series("training/rollout_log_probs_diff_ulps_max", COMPARED + 1)
    assert all(apart <= MOST for apart in by_token), by_token


def test_a_layout_that_comes_back_starts_no_process(changed):
    whole, pair, again = changed.forced
    assert pair["serve"] == whole["served"]
    assert again["serve"] == whole["serve"]


def test_the_job_learns_what_the_fixed_job_learns(jobs, changed):
    """It strays no further than a few times as far as two jobs that are never changed."""
    stock, fixed = jobs("stock"), jobs("fixed")
    assert stock.ran.returncode == 0, stock.ran.output[-4000:]
    series = [job.ran.metrics[:COMPARED] for job in (stock, fixed, changed)]
    for steps in series:
        assert len(steps) == COMPARED
        assert min(step["actor/grad_norm"] for step in steps) > 0.01  # there is something to learn
    apart, found = gaps(series[0], series[1]), gaps(series[1], series[2])
    print(f"two fixed jobs differ by {apart}, the changed one by {found}")
    limits = allowed(apart)
    strayed = {name: (gap, limits[name]) for name, gap in found.items() if gap > limits[name]}
    assert not strayed, f"(difference, allowed): {strayed}"
