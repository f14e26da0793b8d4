"""A node of Ray that goes without notice, in the middle of a step: its raylet is killed."""

import openrlhf_job
import pytest
from openrlhf_seen import adapt, require_same_state, require_same_tokens, require_sound_end

from nereus_core.events import DevicesChanged, TransitionFinished

pytestmark = pytest.mark.real

AWAY = "127.0.0.2:"
GOES_ON_S = 120.0
"""From the end of a node until the job goes on: Ray's own 30 s until it says so, and a change."""
JOB = {
    "train__colocate_actor_ref": True,
    "actor__num_gpus_per_node": 2,
    "ref__num_gpus_per_node": 2,
    "vllm__num_engines": 2,
    "data__max_samples": 40,
}
APART = {
    "actor/train": [["home:0"]],
    "ref/infer": [["home:0"], ["away:0"]],
    "actor/generate": [["home:1"], ["away:1"]],
}
"""The other node has an engine and a replica of the reference, and no state of its own."""


def on(record):
    """Devices of all units after a change, as text."""
    plan = record["after"]["plan"]
    return [device for at in plan.values() for unit in at["units"] for device in unit]


@pytest.mark.parametrize("part", ["generation", "experience", "broadcast"])
def test_a_job_goes_on_without_the_engine_and_the_reference_of_a_lost_node(assets, tmp_path, part):
    ran, (spread, lost), events = adapt(
        assets, tmp_path, {"1": APART}, node={"2": f"killed amid {part}"}, **JOB
    )
    assert sum(device.startswith(AWAY) for device in on(spread)) == 2
    assert not any(device.startswith(AWAY) for device in on(lost))
    assert lost["after"]["time"] - lost["killed"] < GOES_ON_S
    require_same_state(lost)
    require_same_tokens(lost)
    assert any(isinstance(event, DevicesChanged) for event in events)
    done = [event.outcome for event in events if isinstance(event, TransitionFinished)]
    assert done == ["done", "done"]
    # Amid a broadcast the step has trained already; its number is not that of a boundary.
    records = (spread,) if part == "broadcast" else (spread, lost)
    require_sound_end(ran, records, tmp_path, steps=5)


def test_a_job_that_lost_state_with_a_node_says_so_and_goes_on_from_its_checkpoint(
    assets, tmp_path
):
    job = JOB | {"ckpt__save_steps": 1, "ckpt__max_num": 2}
    spread = {
        "actor/train": [["home:0"], ["away:0"]],
        "ref/infer": [["home:0"], ["away:0"]],
        "actor/generate": [["home:1"]],
    }
    ran, (_, lost), events = adapt(
        assets,
        tmp_path,
        {"1": spread},
        node={"2": "killed amid generation"},
        ends="failed: StateLost: no intact copy of actor/train is left; the newest checkpoint is",
        **job,
    )
    assert lost["error"].startswith("StateLost")
    assert lost["time"] - lost["killed"] < GOES_ON_S
    assert "ckpt/_actor/global_step2" in events[-1].outcome
    assert "--ckpt.load_enable" in events[-1].outcome
    assert len(ran.steps()) == 2
    again = openrlhf_job.run(
        openrlhf_job.flags(assets, tmp_path, ckpt__load_enable=True, **job),
        tmp_path / "again",
        module="openrlhf.cli.train_ppo_ray",
    )
    assert again.code == 0, again.output[-6000:]
    assert [step["step"] for step in again.steps()] == [3.0, 4.0, 5.0]
