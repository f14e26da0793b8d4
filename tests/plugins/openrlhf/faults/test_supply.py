"""Devices that a running job is asked to leave, and that it gets back."""

import pytest
from openrlhf_seen import adapt, require_same_state, require_same_tokens, require_sound_end

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real


def held(record, moment):
    """Devices of all units, as text."""
    plan = record[moment]["plan"]
    return {device for at in plan.values() for unit in at["units"] for device in unit}


def test_units_leave_devices_that_are_asked_back_and_come_again(assets, tmp_path):
    """Names of devices are written into the run's folder while the job runs, and taken out again.

    What to do about it is Nereus's own decision: leaving is urgent, coming back has to pay.
    """
    ran, (away, back), events = adapt(
        assets,
        tmp_path,
        {},
        leave={"2": {"actor/train": [1], "actor/generate": [1]}, "4": {}},
        admission="saving>0",
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        data__max_samples=64,
    )
    all_four, left = held(away, "before"), held(away, "after")
    asked = set((tmp_path / "run" / "asked").read_text().splitlines())
    assert len(all_four) == 4
    assert len(asked) == 2
    assert left.isdisjoint(asked)
    # nothing of the job's models waits there
    assert asked.isdisjoint(away["ranks on"])
    assert left <= all_four
    assert held(back, "after") & asked, events
    for record in (away, back):
        require_same_state(record)
        require_same_tokens(record)
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert {event.outcome for event in done} == {"done"}
    require_sound_end(ran, (away, back), tmp_path, steps=8)


def test_a_node_that_ray_drains_is_left_and_may_go(assets, tmp_path):
    """Two nodes of Ray: one gets its notice, units leave it, and its end is no loss to the job."""
    ran, (notice, end), events = adapt(
        assets,
        tmp_path,
        {},
        node={"2": "drained", "4": "killed"},
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        data__max_samples=48,
    )
    on_node = {device for device in held(notice, "before") if device.startswith("127.0.0.2:")}
    assert len(on_node) == 2
    for record, moment in ((notice, "after"), (end, "before"), (end, "after")):
        assert on_node.isdisjoint(held(record, moment))
    assert on_node.isdisjoint(notice["ranks on"])
    for record in (notice, end):
        require_same_state(record)
        require_same_tokens(record)
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert [event.outcome for event in done] == ["done"]
    require_sound_end(ran, (notice, end), tmp_path, steps=6)
