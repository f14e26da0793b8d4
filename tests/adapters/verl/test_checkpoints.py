"""What verl saves after a reshape goes on under stock verl, and on another number of ranks."""

import pytest

pytestmark = pytest.mark.real

NAMES = ["actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"]


@pytest.mark.parametrize("name", ["stock-resumed", "resumed"])
def test_the_next_steps_are_those_of_a_job_that_never_stopped(jobs, name):
    job, fixed = jobs(name), jobs("fixed-grpo")
    assert job.ran.returncode == 0, job.ran.output[-4000:]
    assert len(job.ran.metrics) == 2
    for found, expected in zip(job.ran.metrics, fixed.ran.metrics[3:5], strict=True):
        for metric in NAMES:
            assert found[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-6), metric


def test_a_checkpoint_of_four_ranks_is_read_by_two_and_said_so(jobs):
    job = jobs("resumed")
    assert "[nereus] actor: the checkpoint of 4 ranks was read by 2" in job.ran.output
    assert job.outcome == "done"


def test_verls_files_are_named_after_the_number_of_ranks(jobs):
    """Why `resumed` needs Nereus: two ranks of verl alone look for files of two."""
    saved = jobs("forced-grpo").work / "checkpoints" / "global_step_3" / "actor"
    assert sorted(f.name for f in saved.glob("model_world_size_*")) == [
        f"model_world_size_4_rank_{rank}.pt" for rank in range(4)
    ]


def test_a_changed_job_strays_no_further_than_fixed_jobs_do(jobs, record_property):
    """Two fixed jobs of verl itself, on four ranks and on two, add up in another order."""
    fixed = jobs("fixed-grpo").ran.metrics
    stray = stray_from(fixed[3:5], jobs("stock-resumed").ran.metrics)
    changed = stray_from(fixed[:5], jobs("forced-grpo").ran.metrics)
    record_property("fixed", stray)
    record_property("changed", changed)
    print(f"fixed jobs differ by up to {stray:.2g} of a figure, the changed one by {changed:.2g}")
    assert changed <= max(5 * stray, 1e-5)


def stray_from(expected, found):
    """Largest difference of a figure, as a part of it; losses near zero sum larger terms."""
    return max(
        abs(there[name] - here[name]) / max(abs(here[name]), 0.05)
        for here, there in zip(expected, found, strict=True)
        for name in NAMES
    )
