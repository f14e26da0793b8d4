"""separate_async: trainers and rollout replicas in pools of their own, each changed live."""

import pytest
from verl_cpu.alike import require_same_state
from verl_cpu.command import SEPARATE

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real

STEPS = 9
PLANS = {
    1: {"actor/generate": ["tp1pp1", [2, 3]]},
    2: {"actor/train": ["tp2pp1", [0, 1, 4, 5]]},
    # The ranks refuse to meet, once; a replica has come beside the rank on device 4.
    3: {"actor/train": ["tp2pp1", [0, 1]], "actor/generate": ["tp1pp1", [2, 4]]},
    4: {"actor/train": ["tp2pp1", [0, 1]], "actor/generate": ["tp1pp1", [3]]},
    5: {"actor/generate": ["tp2pp1", [3, 5]]},
    6: {"actor/train": ["tp2pp1", [0, 1, 2, 5]], "actor/generate": ["tp1pp1", [3]]},
    7: {"actor/train": ["tp2pp1", [2, 5]], "actor/generate": ["tp1pp1", [0, 3]]},
    "8+": {"actor/train": ["tp1pp1", [2, 5]], "actor/generate": ["tp1pp1", [1]]},
}
"""Devices 0 and 1 are the trainers', 2 the replica's, the others are Ray's to give. From step 6 on
devices go from pool to pool in one transition: one of a replica, then one that verl gave the
trainers. The replica of two lies on devices that came one by one, in placement groups of their own.
The last transition comes amid step 8, and brings a replica that needs weights at once."""
MOMENTS = [str(moment) for moment in PLANS]
REFUSED = 3
THRESHOLD = 4
FORCED = (
    "+nereus.timeouts.step_s=300",
    "+nereus.timeouts.primitive_s=300",
    "+nereus.timeouts.boundary_s=300",
    "+nereus.policy.admission=never",
    "+nereus.backend.max_devices=6",
    f"trainer.v1.sampler.max_off_policy_threshold={THRESHOLD}",
)


@pytest.fixture(scope="module")
def job(launch):
    found = launch(
        "separate",
        *SEPARATE,
        *FORCED,
        plans=PLANS,
        env={"VERL_CPU_FAULT": f"refuse-join:{REFUSED}"},
        steps=STEPS,
        ray_devices=6,
        micro=4,
    )
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    assert found.outcome == "done"
    assert [f"{r['step']}{r['moment']}" for r in found.forced] == MOMENTS
    return found


def units(record, stage):
    return [len(unit) for unit in record["plan"][stage]["units"]]


def test_replicas_come_and_go_and_change_their_degree(job):
    seen = [units(record, "actor/generate") for record in job.forced]
    assert seen == [[1, 1], [1, 1], [1, 1], [1], [2], [1], [1, 1], [1]]


def test_ranks_come_and_go(job):
    assert [record["world"] for record in job.forced] == [2, 4, 4, 2, 2, 4, 2, 2]


def test_parameters_moments_and_schedules_are_the_same_bit_for_bit(job):
    for record in job.forced:
        require_same_state(record)


def test_every_replica_on_the_balancer_serves_the_last_synchronization(job):
    for record in job.forced:
        assert record["versions"]
        assert set(record["versions"].values()) == {record["step"] - 1}, record["versions"]


def test_nothing_is_trained_on_that_is_staler_than_the_trainer_allows(job):
    worst = job.series("training/off_policy/trajectory_staleness_worst/max", STEPS)
    assert len(worst) == STEPS
    assert max(worst) < THRESHOLD


def test_devices_that_nobody_needs_go_back_to_ray(job):
    """Of six: those of ranks and replicas, and those that verl gave the trainers, are held."""
    assert [record["free"] for record in job.forced] == [2, 0, 0, 3, 2, 1, 1, 2]


def test_a_transition_that_fails_leaves_the_job_going_on(job):
    outcomes = [e.outcome for e in job.events if isinstance(e, TransitionFinished)]
    failed = [m for m, outcome in zip(MOMENTS, outcomes, strict=True) if outcome != "done"]
    assert failed == [str(REFUSED)]
    assert len(job.ran.metrics) == STEPS
    assert min(job.series("actor/grad_norm", STEPS)) > 0


COLOCATED = {
    1: {"actor/generate": ["tp2pp1", 2]},
    2: {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp1", 4]},
    3: {"actor/generate": ["tp1pp1", 2], "actor/train": ["tp2pp1", 2]},
}


@pytest.fixture(scope="module")
def colocated(launch):
    found = launch(
        "colocated",
        "trainer.v1.trainer_mode=colocate_async",
        "actor_rollout_ref.rollout.free_cache_engine=True",
        *FORCED,
        plans=COLOCATED,
        steps=5,
        ray_devices=4,
    )
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    return found


def test_colocate_async_changes_as_a_synchronous_job_does(colocated):
    assert [record["world"] for record in colocated.forced] == [2, 4, 2]
    assert all(record["before"] == record["after"] for record in colocated.forced)
    first, wide, last = colocated.forced
    assert set(first["served"]) < set(wide["serve"])  # they have slept for a step
    assert last["serve"] == first["served"]
    outcomes = [e.outcome for e in colocated.events if isinstance(e, TransitionFinished)]
    assert outcomes == ["done"] * 3
    worst = colocated.series("training/off_policy/trajectory_staleness_worst/max", 5)
    assert len(worst) == 5
    assert max(worst) < THRESHOLD


CIRCLE = {
    1: {"actor/generate": ["tp2pp1", [2, 3]]},
    2: {"actor/generate": ["tp1pp1", [2]], "actor/train": ["tp2pp1", [0, 3]]},
}
"""In step 2 the trainers' only unit ends before another is made of it: that one's device is the
replica's until then."""


def test_a_unit_that_ends_first_is_what_the_next_is_made_of(launch):
    found = launch("circle", *SEPARATE, *FORCED, plans=CIRCLE, steps=3, ray_devices=4, micro=4)
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    outcomes = [e.outcome for e in found.events if isinstance(e, TransitionFinished)]
    assert outcomes == ["done", "done"]
    for record in found.forced:
        require_same_state(record)
    placed = found.forced[-1]["plan"]["actor/train"]["units"]
    assert [unit.rsplit(":", 1)[1] for unit in placed[0]] == ["0", "3"]
