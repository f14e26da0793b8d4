"""What verl saves after a reshape goes on under stock verl, and on another number of ranks."""

import pytest
from verl_cpu.alike import gaps

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", ["stock-resumed", "resumed"])
def test_the_next_steps_are_those_of_a_job_that_never_stopped(jobs, name, tolerance):
    job, fixed = jobs(name), jobs("fixed-grpo")
    assert job.ran.returncode == 0, job.ran.output[-4000:]
    assert len(job.ran.metrics) == 2
    limits = tolerance("grpo")
    for figure, gap in gaps(fixed.ran.metrics[3:5], job.ran.metrics).items():
        assert gap <= limits[figure], (figure, gap, limits[figure])


def test_a_checkpoint_of_four_ranks_is_read_by_two_and_said_so(jobs):
    job = jobs("resumed")
    assert "[nereus] actor: the checkpoint of 4 ranks was read by 2" in job.ran.output
    assert job.outcome == "done"


def test_verls_files_are_named_after_the_number_of_ranks(jobs):
    """Why `resumed` needs Nereus: two ranks of verl alone look for files of two."""
    saved = jobs("saved-grpo").work / "checkpoints" / "global_step_3" / "actor"
    assert sorted(f.name for f in saved.glob("model_world_size_*")) == [
        f"model_world_size_4_rank_{rank}.pt" for rank in range(4)
    ]
