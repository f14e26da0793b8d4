"""Devices that a job did not start with: free ones of its Ray, and a node that comes and goes."""

import pytest
from openrlhf_seen import (
    adapt,
    layouts,
    require_same_state,
    require_same_tokens,
    require_sound_end,
)

from nereus_core.events import DevicesChanged, TransitionFinished

pytestmark = pytest.mark.real

NO_REFERENCE = {"algo__kl__init_coef": 0, "algo__kl__use_loss": False}


def held(record, moment):
    """Devices of all units, as text."""
    plan = record[moment]["plan"]
    return {device for at in plan.values() for unit in at["units"] for device in unit}


def test_engines_and_ranks_go_to_devices_that_ray_has_free_and_leave_them(assets, tmp_path):
    """Another job could have them before and after: Ray counts them as free."""
    ran, records, events = adapt(
        assets,
        tmp_path,
        {
            "1": {
                "actor/generate": [[0], ["free:0"]],
                "actor/train": [[0], ["free:1"]],
                "ref/infer": [[0], ["free:1"]],
            },
            # one device it began with, one that joined: an engine of two placement groups
            "2": {"actor/generate": [[0, "free:0"]]},
            "3": {"actor/generate": [[0]], "actor/train": [[0]], "ref/infer": [[0]]},
        },
        max_devices=4,
        gpus=4,
        train__colocate_actor_ref=True,
        data__max_samples=40,
    )
    one, two, three = records
    own = held(one, "before")
    assert len(own) == 2
    assert len(held(one, "after")) == len(held(two, "after")) == 4
    for stage in ("actor/train", "ref/infer", "actor/generate"):
        assert layouts(one, stage) == [1, 1]
    assert layouts(two, "actor/generate") == [2]
    assert held(three, "after") == own
    assert [record["before"]["free"] for record in records] == [2, 0, 0]
    assert [record["after"]["free"] for record in records] == [0, 0, 2]
    for record in records:
        require_same_state(record)
        require_same_tokens(record)
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert [event.outcome for event in done] == ["done"] * 3
    require_sound_end(ran, records, tmp_path, steps=5)


def test_ranks_of_critic_reward_and_reference_go_to_devices_that_join_and_leave_them(
    assets, tmp_path
):
    """In a PPO job with all four models; the critic's state is for a while on no other device."""
    ran, records, events = adapt(
        assets,
        tmp_path,
        {
            "1": {
                "critic/train": [[0], ["free:0"]],
                "reward/infer": [[0], ["free:0"]],
                "ref/infer": [[0], ["free:1"]],
            },
            "2": {
                "critic/train": [["free:0"]],
                "reward/infer": [["free:1"]],
                "ref/infer": [[0]],
            },
            "3": {"critic/train": [[0]], "reward/infer": [[0]]},
        },
        max_devices=5,
        gpus=5,
        algo__advantage__estimator="gae",
        algo__kl__use_loss=False,
        algo__kl__estimator="k1",
        reward__remote_url=None,
        reward__model_name_or_path=assets / "judge",
        reward__num_nodes=1,
        reward__num_gpus_per_node=1,
        critic__num_gpus_per_node=1,
        train__colocate_actor_ref=True,
        train__colocate_critic_reward=True,
        data__max_samples=40,
    )
    one, two, three = records
    own = held(one, "before")
    assert len(own) == 3
    for stage in ("critic/train", "reward/infer", "ref/infer"):
        assert layouts(one, stage) == [1, 1]
    (critic,), (reward,) = (
        two["after"]["plan"][s]["units"] for s in ("critic/train", "reward/infer")
    )
    assert {*critic, *reward} == held(one, "after") - own
    assert held(three, "after") == own
    assert [record["before"]["free"] for record in records] == [2, 0, 0]
    assert [record["after"]["free"] for record in records] == [0, 0, 2]
    for record in records:
        assert set(record["after"]["at"]) == {"actor/train", "critic/train"}
        require_same_state(record)
        require_same_tokens(record)
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert [event.outcome for event in done] == ["done"] * 3
    require_sound_end(ran, records, tmp_path, steps=5)


def test_an_asynchronous_job_generates_on_a_device_that_joins_and_leaves_it(assets, tmp_path):
    """For two steps it is the only one: what is generated then comes from there."""
    ran, records, events = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/generate": [["free:0"]]},
            "3": {"actor/generate": [[0]]},
        },
        max_devices=3,
        gpus=3,
        train__async_enable=True,
        data__max_samples=40,
        **NO_REFERENCE,
    )
    one, back = records
    own = held(one, "before")
    assert len(own) == 2
    ((joined,),) = one["after"]["plan"]["actor/generate"]["units"]
    assert joined not in own
    assert held(back, "after") == own
    assert [record["before"]["free"] for record in records] == [1, 0]
    assert [record["after"]["free"] for record in records] == [0, 1]
    for record in records:
        require_same_state(record)
        require_same_tokens(record)
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert [event.outcome for event in done] == ["done"] * 2
    require_sound_end(ran, records, tmp_path, steps=5, kl=0.1)


def test_a_job_spreads_to_a_node_that_comes_and_leaves_it_when_ray_drains_it(assets, tmp_path):
    """What to do is Nereus's own decision. Ray ends the node when nothing is left there."""
    ran, (came, notice, end), events = adapt(
        assets,
        tmp_path,
        {},
        node={"2": "came", "4": "drained", "5": "gone"},
        admission="saving>0",
        max_devices=4,
        data__max_samples=56,
        **NO_REFERENCE,
    )
    own = held(came, "before")
    away = held(came, "after") - own
    assert away, events
    assert all(device.startswith("127.0.0.2:") for device in away)
    assert held(notice, "before") >= away
    for record, moment in ((notice, "after"), (end, "before"), (end, "after")):
        assert held(record, moment) <= own
    assert not [device for device in notice["ranks on"] if device in away]
    for record in (came, notice, end):
        require_same_state(record)
        require_same_tokens(record)
    (first, *_) = [event for event in events if isinstance(event, DevicesChanged)]
    assert set(first.returned) >= away
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert {event.outcome for event in done} == {"done"}
    require_sound_end(ran, (came, notice, end), tmp_path, steps=7)
