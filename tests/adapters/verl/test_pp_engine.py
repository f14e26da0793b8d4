"""Pipeline stages changed live, under Nereus's own engine: real jobs, GRPO and PPO."""

import pytest
from verl_cpu.alike import gaps, require_same_state

from nereus_core.events import PrimitiveFinished, TransitionFinished

pytestmark = pytest.mark.real

STEPS = 5
"""That are compared; the PPO job is changed after three of them."""
OWN = ("+nereus.backend.engine=tp", "+nereus.backend.max_pipeline_stages=2")
FORCED = (
    *OWN,
    "+nereus.timeouts.step_s=300",
    "+nereus.timeouts.primitive_s=300",
    "+nereus.timeouts.boundary_s=300",
    "+nereus.policy.admission=never",
    "+nereus.backend.max_devices=4",
)
WIDE = {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp2", 4]}
GRPO_PLANS = {
    1: {"actor/train": ["tp1pp2", 2]},
    2: {"actor/train": ["tp2pp1", 2]},
    3: WIDE,
    4: {"actor/train": ["tp1pp2", 2], "actor/generate": ["tp1pp1", 2]},  # refused, once
    5: {"actor/train": ["tp1pp2", 4], "actor/generate": ["tp2pp1", 4]},
}
"""Two whole copies -> one of two stages -> one of two halves of each tensor -> one of both, on four
ranks -> two of two stages; at last beside rollouts of another TP."""
PPO_PLANS = {
    1: {"critic/train": ["tp2pp1", 2], "ref/infer": ["tp1pp1", 2]},
    2: {"actor/train": ["tp1pp1", 2], "critic/train": ["tp1pp2", 2], "ref/infer": ["tp1pp2", 2]},
    3: {**WIDE, "critic/train": ["tp1pp2", 4], "ref/infer": ["tp2pp1", 4]},
}
"""From a start in two stages, all three of them."""
SAVED_STEP = 4
"""While it trains in two stages of two ranks each."""


@pytest.fixture(scope="module")
def grpo(launch):
    found = launch(
        "pp-grpo", *FORCED, f"trainer.save_freq={SAVED_STEP}",
        plans=GRPO_PLANS, env={"VERL_CPU_FAULT": "refuse-join:4"}, steps=STEPS + 1, ray_devices=4,
        shard_size=1,
    )  # fmt: skip
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    assert found.outcome == "done"
    return found


@pytest.fixture(scope="module")
def ppo(launch):
    found = launch(
        "pp-ppo", *FORCED, "+nereus.backend.pipeline_stages=2", "critic.fsdp.fsdp_size=2",
        "actor_rollout_ref.ref.fsdp_config.fsdp_size=2",
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


def test_stages_are_those_asked_for(grpo, ppo):
    seen = [(r["plan"]["actor/train"]["layout"], r["world"]) for r in grpo.forced[:3]]
    assert seen == [("tp1pp2", 2), ("tp2pp1", 2), ("tp2pp2", 4)]
    assert grpo.forced[4]["plan"]["actor/train"]["layout"] == "tp1pp2"
    stages = ("actor/train", "critic/train", "ref/infer")
    seen = [tuple(r["plan"][stage]["layout"] for stage in stages) for r in ppo.forced]
    assert seen == [
        ("tp1pp2", "tp2pp1", "tp1pp1"),
        ("tp1pp1", "tp1pp2", "tp1pp2"),
        ("tp2pp2", "tp1pp2", "tp2pp1"),
    ]
    assert "actor/train=tp1pp2dp1" in ppo.ran.output  # from the start


def test_the_last_stage_of_a_unit_answers_for_it(grpo):
    """Ranks run over tensor-parallel ranks first, then over stages: (unit, whether it answers)."""
    parts = [rank["parts"]["actor"] for rank in grpo.forced[2]["shared"]]
    assert parts == [[0, False], [0, False], [0, True], [0, False]]
    parts = [rank["parts"]["actor"] for rank in grpo.forced[4]["shared"]]
    assert parts == [[0, False], [0, True], [1, False], [1, True]]


def test_parameters_moments_and_schedules_are_the_same_bit_for_bit(job):
    for record in job.forced:
        if "error" not in record:
            require_same_state(record)
            assert record["alike"] == [True, True]


def test_a_switch_that_fails_is_undone_with_its_stages(grpo):
    outcomes = [event.outcome for event in grpo.events if isinstance(event, TransitionFinished)]
    assert [outcome == "done" for outcome in outcomes] == [True, True, True, False, True]
    assert len(grpo.ran.metrics) == STEPS + 1


def test_the_rollout_follows_the_actor_after_every_transition(job):
    """Each rank's replica gets the layers of all stages."""
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6


def test_the_job_learns_what_verls_own_engine_learns(job, jobs, case, tolerance):
    limits, fixed = tolerance(case), jobs(f"fixed-{case}").ran.metrics[:STEPS]
    found = gaps(fixed, job.ran.metrics[:STEPS], tuple(limits))
    print(f"the {case} job whose stages changed differs by {found}")
    strayed = {name: (gap, limits[name]) for name, gap in found.items() if gap > limits[name]}
    assert not strayed, f"(difference, allowed): {strayed}"


def test_no_process_group_of_an_engine_that_went_is_left(grpo):
    """The same plan has as many groups, however the ranks came to it."""
    first, last = grpo.forced[0], grpo.forced[-1]
    before = {told["groups"] for told in first["shared_before"]}
    assert len(before) == 1
    for record in grpo.forced:
        if "error" not in record:
            assert len({told["groups"] for told in record["shared"]}) == 1
            assert not any(told["lingering"] for told in record["shared"])
    # A dimension of the mesh more and the way back of the pipeline, of the actor alone, beside
    # dimensions that were those of all ranks, or of one, and are not.
    assert last["shared"][0]["groups"] <= before.pop() + 4


def test_what_stays_on_a_rank_is_not_sent(grpo):
    """Of two whole copies each rank has all of the stage that it becomes."""
    done = [event for event in grpo.events if isinstance(event, PrimitiveFinished)]
    merged = next(event for event in done if event.stage == "actor/train")
    assert merged.moved_bytes == 0
    assert merged.kept_bytes > 0


@pytest.fixture(scope="module")
def resumed(launch, grpo):
    saved = grpo.work / "checkpoints" / f"global_step_{SAVED_STEP}"
    found = launch(
        "pp-resumed", *OWN, "+nereus.backend.pipeline_stages=2", "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={saved}", steps=STEPS, shard_size=2,
    )  # fmt: skip
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    return found


def test_a_checkpoint_of_two_by_two_ranks_goes_on_in_two_stages(resumed, grpo, tolerance):
    assert "the checkpoint of 4 ranks was read by 2" in resumed.ran.output
    limits = tolerance("grpo")
    following = grpo.ran.metrics[SAVED_STEP:STEPS]
    for figure, gap in gaps(following, resumed.ran.metrics).items():
        assert gap <= limits[figure], (figure, gap, limits[figure])
