import pytest

from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import UnitLost
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.sim.clock import VirtualClock
from nereus_core.sim.job import SimJob
from nereus_core.sim.models import TINY
from nereus_core.sim.pace import Script
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    ALGORITHMS,
    BFLOAT16_MIXED,
    FLOAT64,
    Job,
)


def job(algorithm="grpo", *, asynchronous=False, precision=FLOAT64):
    return Job(
        workload=ALGORITHMS[algorithm](asynchronous=asynchronous),
        models={"actor": TINY, "ref": TINY, "critic": TINY.as_critic("critic")},
        cluster=Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK),
        global_batch=12,
        max_prompt_tokens=16,
        max_response_tokens=100,
        precision=precision,
    )


def everywhere(static, layout, num_devices=4):
    placement = Placement.packed(layout, static.cluster.devices[:num_devices])
    return Plan(dict.fromkeys(static.workload.stages, placement))


def run(static, plan, num_steps=3, **options):
    running = SimJob(static, plan, **options)
    return [running.step() for _ in range(num_steps)]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "remax"])
def test_losses_and_norms_are_bit_equal_under_every_layout(algorithm):
    static = job(algorithm)
    reference = run(static, everywhere(static, Layout(1, 1), 1))

    for layout, devices in (
        (Layout(2, 1), 4),
        (Layout(1, 4), 4),
        (Layout(4, 1), 4),
        (Layout(1, 3), 3),
    ):
        results = run(static, everywhere(static, layout, devices))
        assert [(r.losses, r.grad_norms, r.sample_ids) for r in results] == [
            (r.losses, r.grad_norms, r.sample_ids) for r in reference
        ]


def test_losses_depend_on_the_seed_and_on_earlier_steps():
    static = job()
    plan = everywhere(static, Layout(2, 1))
    losses = [r.losses["actor"] for r in run(static, plan)]
    others = [r.losses["actor"] for r in run(static, plan, script=Script(seed=1))]

    assert len(set(losses)) == 3
    assert losses != others


def test_generation_serves_the_weights_of_the_step_before():
    static = job()
    results = run(static, everywhere(static, Layout(1, 1)))

    assert [set(r.weight_version.values()) for r in results] == [{0}, {1}, {2}]


def test_an_asynchronous_job_trains_on_what_was_generated_a_step_before():
    static = job(asynchronous=True)
    results = run(static, everywhere(static, Layout(1, 1)))

    assert [r.sample_ids for r in results] == [tuple(range(12 * i, 12 * i + 12)) for i in range(3)]
    assert [set(r.weight_version.values()) for r in results] == [{0}, {1}, {2}]


def test_longer_responses_take_longer_on_the_virtual_clock():
    static = job()
    running = SimJob(
        static,
        everywhere(static, Layout(2, 1)),
        script=Script(response_tokens=lambda step: 10.0 if step < 1 else 80.0),
        clock=VirtualClock(),
    )
    seen = []
    for _ in range(2):
        running.step()
        seen.append(running.seen())

    short, long = seen
    assert long.response_tokens.mean > 3 * short.response_tokens.mean
    assert long.stage_s[ACTOR_GENERATE] > 3 * short.stage_s[ACTOR_GENERATE]
    assert long.step_s == pytest.approx(sum(long.stage_s.values()))
    assert long.response_tokens.max <= static.max_response_tokens


def test_a_lost_unit_ends_the_step_before_anything_is_trained():
    static = job()
    running = SimJob(static, everywhere(static, Layout(1, 1)))
    running.step()
    kept = running.units.of(ACTOR_TRAIN)[0]
    counters = dict(running.live(kept.id).counters)
    running.fail(static.cluster.devices[3])

    with pytest.raises(UnitLost) as info:
        running.step()

    assert {str(u) for u in info.value.lost} == {"actor/generate#3", "actor/train#3", "ref/infer#3"}
    assert running.live(kept.id).counters == counters
    running.relink()
    assert running.step().sample_ids == tuple(range(12, 24))


def test_state_has_a_precision_that_numpy_has():
    static = job(precision=BFLOAT16_MIXED)

    with pytest.raises(ValueError, match="bfloat16"):
        SimJob(static, everywhere(static, Layout(1, 1)))
