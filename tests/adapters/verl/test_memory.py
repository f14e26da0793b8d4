"""Batches that outgrow the memory of two ranks: the job alone dies, under Nereus it finishes."""

import pytest
from verl_cpu import outgrown

from nereus_core.events import Decided, RunFinished, TransitionFinished

pytestmark = pytest.mark.real


def test_alone_the_job_dies_of_memory(outgrowing):
    job = outgrowing(nereus=False)
    assert job.ran.returncode != 0
    assert "DefaultCPUAllocator: can't allocate memory" in job.ran.output
    assert len(job.ran.metrics) == 1  # it dies of the first long batch


def test_under_nereus_it_gets_a_layout_that_holds_the_batch(outgrowing):
    job = outgrowing(nereus=True)
    assert job.ran.returncode == 0, job.ran.output[-4000:]
    assert len(job.ran.metrics) == outgrown.STEPS
    first, *_ = [e for e in job.events if isinstance(e, Decided) and e.admitted]
    assert (first.trigger, first.path) == ("memory", "urgent")
    assert first.signal.startswith("the batch just sampled: ")
    done = [e.outcome for e in job.events if isinstance(e, TransitionFinished)]
    assert done
    assert set(done) == {"done"}
    assert job.series("nereus/actor_train/devices_per_unit", outgrown.STEPS)[-1] == 4.0
    finished = job.events[-1]
    assert isinstance(finished, RunFinished)
    assert finished.outcome == "done"
