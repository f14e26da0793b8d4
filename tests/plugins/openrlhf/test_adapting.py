"""Real `train_ppo_ray` jobs that change while they run."""

import pytest
from openrlhf_seen import (
    adapt,
    layouts,
    require_same_state,
    require_same_tokens,
    require_sound_end,
)

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real


def test_ppo_changes_engines_actor_and_critic_and_trains_on(assets, tmp_path):
    ran, (one, two, three, four), events = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/generate": [[0, 1]], "critic/train": [[1]]},
            "2": {"actor/train": [[0]]},
            "3": {"actor/generate": [[0], [1]], "actor/train": [[0, 1]]},
            "4": {"critic/train": [[1], [0]], "actor/train": [[0], [1]]},
        },
        algo__advantage__estimator="gae",
        algo__kl__use_loss=False,
        algo__kl__estimator="k1",
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        critic__num_gpus_per_node=2,
        data__max_samples=40,
    )
    assert (layouts(one, "actor/generate"), layouts(one, "critic/train")) == ([2], [1])
    assert layouts(two, "actor/train") == [1]
    # engines that a change starts are in seats; none of OpenRLHF's own are
    assert [record["before"]["seated"] for record in (one, two)] == [0, 1]
    assert [record["after"]["seated"] for record in (one, two, three, four)] == [1, 1, 2, 2]
    assert (layouts(three, "actor/generate"), layouts(three, "actor/train")) == ([1, 1], [2])
    assert (layouts(four, "critic/train"), layouts(four, "actor/train")) == ([1, 1], [1, 1])
    for record in (one, two, three, four):
        require_same_state(record)
        require_same_tokens(record)
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert [event.outcome for event in done] == ["done"] * 4
    require_sound_end(ran, (one, two, three, four), tmp_path, steps=5)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_grpo_on_other_stages_of_zero_changes_the_number_of_its_ranks(assets, tmp_path, zero_stage):
    ran, (one, two), _ = adapt(
        assets,
        tmp_path,
        {"1": {"actor/train": [[0]]}, "2": {"actor/train": [[1], [0]]}},
        ds__zero_stage=zero_stage,
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        actor__num_gpus_per_node=2,
        data__max_samples=24,
    )
    assert (layouts(one, "actor/train"), layouts(two, "actor/train")) == ([1], [1, 1])
    for record in (one, two):
        require_same_state(record)
        if zero_stage < 3:  # there no rank has all of the model to compare tokens with:
            require_same_tokens(record)  # the engines' log-probabilities stand in
    require_sound_end(ran, (one, two), tmp_path, steps=3)


def test_an_asynchronous_job_generates_on_its_new_engines(assets, tmp_path):
    ran, (one, two), _ = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/generate": [[0, 1]], "actor/train": [[0]]},
            "2": {"actor/generate": [[0], [1]]},
        },
        train__async_enable=True,
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        data__max_samples=40,
    )
    assert (layouts(one, "actor/generate"), layouts(two, "actor/generate")) == ([2], [1, 1])
    for record in (one, two):
        require_same_state(record)
    require_sound_end(ran, (one, two), tmp_path, steps=5, kl=0.1)
