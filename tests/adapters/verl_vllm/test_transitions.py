"""Rollouts of vLLM's change their layout in a real job, which learns what it learns without."""

import pytest
from verl_cpu.job import COMPARED

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real

NAMES = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean")
PROBABILITY, LOG_PROBABILITY = 1e-6, 1e-5


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
    assert max(changed.series("training/rollout_probs_diff_max", COMPARED + 1)) <= PROBABILITY


def test_a_layout_that_comes_back_starts_no_process(changed):
    whole, pair, again = changed.forced
    assert pair["serve"] == whole["served"]
    assert again["serve"] == whole["serve"]


@pytest.mark.parametrize("name", NAMES)
def test_the_job_learns_what_the_fixed_job_learns(jobs, changed, name):
    stock, fixed = jobs("stock"), jobs("fixed")
    assert stock.ran.returncode == 0, stock.ran.output[-4000:]
    assert changed.series(name) == pytest.approx(fixed.series(name), rel=1e-5, abs=1e-6)
