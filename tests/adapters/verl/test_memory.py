"""A batch too long for the plan: verl alone runs out of memory, with Nereus the job goes on."""

import pytest

from nereus_core.events import Decided, TransitionFinished

pytestmark = pytest.mark.real

LENGTHS = "8,8,64"
"""The third step's responses are eight times as long."""
TOKENS = "1000"
"""Of a micro-batch: 16 sequences of 84 tokens (two ranks) do not fit, 8 of them (four ranks) do."""
MEMORY_BYTES = 28_000_000
"""What the cost model says: 16 MB on two ranks with short responses, 36 MB with long ones; 21 MB on
four. A tenth is headroom."""
SHAPE = {"response": 64, "steps": 4, "ray_devices": 4}
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"


def test_the_fixed_job_dies_and_the_adapted_one_gets_a_plan_that_holds_the_batch(launch):
    env = {"VERL_CPU_LENGTHS": LENGTHS, "VERL_CPU_TOKENS": TOKENS}
    fixed = launch("dies", MICRO, "+nereus.mode=observe", env=env, **SHAPE)
    assert fixed.ran.returncode != 0
    assert "the test's device holds 1000 tokens" in fixed.ran.output
    assert len(fixed.ran.metrics) == 2

    adapted = launch(
        "lives",
        MICRO,
        "+nereus.backend.max_devices=4",
        f"+nereus.backend.device_memory_bytes={MEMORY_BYTES}",
        "+nereus.policy.admission=never",
        env=env,
        **SHAPE,
    )
    assert adapted.ran.returncode == 0, adapted.ran.output[-4000:]
    assert len(adapted.ran.metrics) == 4
    (done,) = [event for event in adapted.events if isinstance(event, TransitionFinished)]
    assert done.outcome == "done"
    urgent = [e for e in adapted.events if isinstance(e, Decided) and e.path == "urgent"]
    assert [(e.step, e.trigger, e.admitted) for e in urgent] == [(1, "memory", True)]
    assert "the batch just sampled" in urgent[0].signal
    # Decided after two steps, before the third was trained on: that step has the new plan.
    devices = [
        step["nereus/actor_train/units"] * step["nereus/actor_train/devices_per_unit"]
        for step in adapted.ran.metrics
    ]
    assert devices == [2.0, 2.0, 4.0, 4.0]
