"""Jobs in which something dies or hangs while they change."""

import pytest
from openrlhf_seen import adapt, require_same_state, require_same_tokens

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real


def test_what_fails_while_a_job_changes_leaves_the_old_job_and_what_dies_is_named(assets, tmp_path):
    ran, (rank, engine, hung), events = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/train": [[1]]},
            "2": {"actor/generate": [[0]]},
            "3": {"actor/generate": [[0]]},
        },
        faults={
            "1": ["killed rank"],
            "2": ["killed engine"],
            "3": ["hung engine"],
            "4": ["dead engine"],
        },
        call_s=25,
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
    assert len(failed) == 3
    # an engine that dies between steps ends the job, with a name, instead of waiting for ever
    assert len(ran.steps()) == 4
    assert "ActorDiedError" in events[-1].outcome
