"""A server of vLLM's that is killed ends the job by name; nothing hangs."""

import pytest
from verl_cpu.job import COMPARED

pytestmark = pytest.mark.real


def test_a_killed_server_ends_the_job_by_name(jobs):
    job = jobs("fixed")
    assert len(job.ran.metrics) >= COMPARED, job.ran.output[-4000:]
    assert job.ran.returncode != 0
    assert job.outcome.startswith("failed: ActorDiedError")
    assert "vllm_server_0_0" in job.outcome
