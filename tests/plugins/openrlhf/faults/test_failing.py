"""Jobs in which something dies or hangs while they change."""

import re
import time

import psutil
import pytest
from openrlhf_seen import adapt, require_same_state, require_same_tokens

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real

CAUSES = (
    "ended .* during digests of actor/train",
    "(ended .* during|waited 60 s for) the weight-sync group of 1 engines",
    "waited 60 s for the (weight-sync group of|broadcast of weights to) 1 engines",
)
"""What is awaited when a rank dies, an engine dies (Ray may be slow to say so), an engine hangs."""


def test_what_fails_while_a_job_changes_leaves_the_old_job_and_what_dies_is_named(assets, tmp_path):
    ran, (rank, engine, hung), events = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/train": [[1]]},
            "2": {"actor/generate": [[0]]},
            "3": {"actor/generate": [[0, 1]]},
        },
        faults={
            "1": ["killed rank"],
            "2": ["killed engine"],
            "3": ["hung engine"],
            "4": ["dead engine"],
        },
        call_s=60,
        group_s=90,  # until it is over, ranks wait for an engine that hung
        timeout_s=600,
        ends="failed: ",
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        data__max_samples=40,
    )
    for record in (rank, engine, hung):
        assert record["after"]["plan"] == record["before"]["plan"]
        require_same_state(record)
        require_same_tokens(record)
    failed = [event for event in events if isinstance(event, TransitionFinished)]
    assert all(event.outcome != "done" for event in failed)
    for event, cause in zip(failed, CAUSES, strict=True):
        assert re.search(cause, event.error), event.error
    # an engine in a seat that was killed with its core stopped is gone, and so are its workers
    assert hung["before"]["seated"] == hung["after"]["seated"] == 0
    pids = [int(pid) for pid in (tmp_path / "seen.pids").read_text().split()]
    assert len(pids) == 3
    deadline_s = time.monotonic() + 10
    while (
        left := [pid for pid in pids if psutil.pid_exists(pid)]
    ) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not left
    # an engine that dies between steps ends the job, with a name, instead of waiting for ever
    assert len(ran.steps()) == 4
    assert re.search(
        r"StepLost: step 5 was not ended: RolloutRayActor died \(pid \d+ on [\d.]+\); "
        r"no checkpoint was kept: set --ckpt.save_steps",
        events[-1].outcome,
    )
    assert "StepLost: step 5 was not ended" in ran.output
