"""Four ranks of an actor, ranks of a reward model, and devices that all stages share."""

import pytest
from openrlhf_seen import (
    adapt,
    layouts,
    require_same_state,
    require_same_tokens,
    require_sound_end,
)

pytestmark = pytest.mark.real


def test_an_actor_of_four_ranks_and_a_reward_model_change_their_ranks(assets, tmp_path):
    ran, (one, two, three), _ = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/train": [[0], [1]], "reward/infer": [[1]]},
            "2": {"actor/train": [[0]]},
            "3": {"actor/train": [[0, 1], [2, 3]], "reward/infer": [[0], [1]]},
        },
        reward__remote_url=None,
        reward__model_name_or_path=assets / "judge",
        reward__num_nodes=1,
        reward__num_gpus_per_node=2,
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        actor__num_gpus_per_node=4,
        data__max_samples=32,
    )
    assert layouts(one, "actor/train") == [1, 1]
    assert layouts(two, "actor/train") == [1]
    assert layouts(three, "actor/train") == [2, 2]
    assert [len(r["after"]["plan"]["reward/infer"]["units"]) for r in (one, two, three)] == [
        1,
        1,
        2,
    ]
    for record in (one, two, three):
        require_same_state(record)
        require_same_tokens(record)
    require_sound_end(ran, (one, two, three), tmp_path, steps=4)


def test_stages_that_share_all_devices_change_beside_each_other(assets, tmp_path):
    ran, (one, two), _ = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/generate": [[0, 1]], "actor/train": [[0]]},
            "2": {"actor/generate": [[0], [1]], "actor/train": [[0, 1]], "ref/infer": [[0]]},
        },
        train__colocate_all=True,
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        ref__num_gpus_per_node=2,
        data__max_samples=24,
    )
    assert (layouts(one, "actor/generate"), layouts(one, "actor/train")) == ([2], [1])
    assert (layouts(two, "actor/generate"), layouts(two, "actor/train")) == ([1, 1], [2])
    assert layouts(two, "ref/infer") == [1]
    for record in (one, two):
        require_same_state(record)
        require_same_tokens(record)
    require_sound_end(ran, (one, two), tmp_path, steps=3)
