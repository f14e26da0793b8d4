"""Training TP changed live, under Nereus's own engine: real jobs, GRPO and PPO."""

import pytest
from verl_cpu.alike import gaps, require_same_state

from nereus_core.events import PrimitiveFinished, TransitionFinished

pytestmark = pytest.mark.real

STEPS = 5
"""That are compared; the PPO job is changed after three of them."""
OWN = "+nereus.backend.engine=tp"
FORCED = (
    OWN,
    "+nereus.timeouts.step_s=300",
    "+nereus.timeouts.primitive_s=300",
    "+nereus.timeouts.boundary_s=300",
    "+nereus.policy.admission=never",
    "+nereus.backend.max_devices=4",
)
WIDE = {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp1", 4]}
GRPO_PLANS = {
    1: {"actor/train": ["tp2pp1", 2]},
    2: {"actor/train": ["tp1pp1", 2]},
    3: WIDE,
    4: {"actor/train": ["tp2pp1", 2], "actor/generate": ["tp1pp1", 2]},  # refused, once
    5: {"actor/train": ["tp4pp1", 4], "actor/generate": ["tp2pp1", 4]},
}
"""TP 1x2 -> 2x1 -> 1x2 -> 2x2 -> 4x1: rows and columns of the same tensors, on up to four ranks; at
last beside rollouts of another TP."""
PPO_PLANS = {
    1: {"critic/train": ["tp1pp1", 2], "ref/infer": ["tp2pp1", 2]},
    2: {"actor/train": ["tp1pp1", 2], "critic/train": ["tp2pp1", 2], "ref/infer": ["tp1pp1", 2]},
    3: {**WIDE, "critic/train": ["tp4pp1", 4], "ref/infer": ["tp2pp1", 4]},
}
SAVED_STEP = 4
"""While it trains as TP 2x2."""


@pytest.fixture(scope="module")
def grpo(launch):
    fault = {"VERL_CPU_FAULT": "refuse-join:4"}
    found = launch(
        "tp-grpo", *FORCED, f"trainer.save_freq={SAVED_STEP}",
        plans=GRPO_PLANS, env=fault, steps=STEPS + 1, ray_devices=4, shard_size=1,
    )  # fmt: skip
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    assert found.outcome == "done"
    return found


@pytest.fixture(scope="module")
def ppo(launch):
    found = launch(
        "tp-ppo", *FORCED, "critic.fsdp.fsdp_size=2",
        "actor_rollout_ref.ref.fsdp_config.fsdp_size=1",
        plans=PPO_PLANS, steps=STEPS, ray_devices=4, shard_size=2, critic=True,
    )  # fmt: skip
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    return found


@pytest.fixture(params=["grpo", "ppo"])
def case(request):
    return request.param


@pytest.fixture
def job(request, case):
    return request.getfixturevalue(case)


def test_tensor_parallel_degrees_are_those_asked_for(grpo, ppo):
    seen = [
        (record["plan"]["actor/train"]["layout"], record["world"]) for record in grpo.forced[:3]
    ]
    assert seen == [("tp2pp1", 2), ("tp1pp1", 2), ("tp2pp1", 4)]
    assert grpo.forced[4]["plan"]["actor/train"]["layout"] == "tp4pp1"
    seen = [
        tuple(record["plan"][stage]["layout"][:3] for stage in ("actor/train", "critic/train"))
        for record in ppo.forced
    ]
    assert seen == [("tp2", "tp1"), ("tp1", "tp2"), ("tp2", "tp4")]
    assert "actor/train=tp2pp1dp1" in ppo.ran.output
    assert "critic/train=tp2pp1dp1" in ppo.ran.output


def test_parameters_moments_and_schedules_are_the_same_bit_for_bit(job):
    for record in job.forced:
        if "error" in record:
            continue
        require_same_state(record)


def test_a_switch_that_fails_is_undone_with_its_tensor_parallel_ranks(grpo):
    outcomes = [event.outcome for event in grpo.events if isinstance(event, TransitionFinished)]
    assert [outcome == "done" for outcome in outcomes] == [True, True, True, False, True]
    assert len(grpo.ran.metrics) == STEPS + 1


def test_the_rollout_follows_the_actor_after_every_transition(job):
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6


def test_the_job_learns_what_verls_own_engine_learns(job, jobs, case, tolerance):
    limits, fixed = tolerance(case), jobs(f"fixed-{case}").ran.metrics[:STEPS]
    found = gaps(fixed, job.ran.metrics[:STEPS], tuple(limits))
    print(f"the {case} job whose training TP changed differs by {found}")
    strayed = {name: (gap, limits[name]) for name, gap in found.items() if gap > limits[name]}
    assert not strayed, f"(difference, allowed): {strayed}"


def groups_of(record):
    """Count the process groups of a rank: the world's, and those of each mesh that it is in.

    torch takes the world's for a dimension of all ranks, and gives a single rank one of its own.
    """
    sizes, world = [1], record["world"]  # the rollout's third dimension
    for stage, placed in record["plan"].items():
        degree = int(placed["layout"][2])
        sizes += [world // degree, degree]
        sizes += [1] if stage != "actor/generate" else []  # the engine's dimension fsdp
    return 1 + sum(size != world for size in sizes)


def test_ranks_leave_the_process_groups_of_engines_that_went(grpo):
    seen = [
        (groups_of(record), [told["groups"] for told in record["shared"]])
        for record in grpo.forced
        if "error" not in record
    ]
    assert all(set(told) == {wanted} for wanted, told in seen), seen


def test_what_stays_on_a_rank_is_not_sent(grpo):
    """Of TP 1x2 each rank of 2x1 has all that it needs."""
    done = [event for event in grpo.events if isinstance(event, PrimitiveFinished)]
    merged = next(event for event in done if event.stage == "actor/train")
    assert merged.moved_bytes == 0
    assert merged.kept_bytes > 0


@pytest.fixture(scope="module")
def resumed(launch, grpo):
    saved = grpo.work / "checkpoints" / f"global_step_{SAVED_STEP}"
    found = launch(
        "tp-resumed", OWN, "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={saved}", steps=STEPS, shard_size=2,
    )  # fmt: skip
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    return found


def test_a_checkpoint_of_two_by_two_ranks_goes_on_as_tensor_parallel_two(resumed, grpo, tolerance):
    assert "the checkpoint of 4 ranks was read by 2" in resumed.ran.output
    limits = tolerance("grpo")
    following = grpo.ran.metrics[SAVED_STEP:STEPS]
    for figure, gap in gaps(following, resumed.ran.metrics).items():
        assert gap <= limits[figure], (figure, gap, limits[figure])
