"""Ulysses sequence parallelism that changes while a job runs, or stays where groups change."""

from types import SimpleNamespace

import pytest
from verl_cpu.alike import FIGURES, TELLING, allowed, gaps

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real

STEPS = 5
FORCED = (
    "+nereus.timeouts.step_s=300",
    "+nereus.timeouts.primitive_s=300",
    "+nereus.timeouts.boundary_s=300",
    "+nereus.policy.admission=never",
    "+nereus.backend.max_devices=4",
)
REFERENCE = "actor_rollout_ref.ref.fsdp_config.fsdp_size={}".format
FOUR = {"actor/generate": ["tp1pp1", 4]}
TWO = {"actor/generate": ["tp1pp1", 2]}
FOLLOWED = {
    1: {"actor/train": ["tp2pp1", 2]},
    2: {**FOUR, "actor/train": ["tp2pp1", 4], "ref/infer": ["tp1pp1", 4]},
    3: {"actor/train": ["tp4pp1", 4], "ref/infer": ["tp2pp1", 4]},
    4: {**TWO, "actor/train": ["tp1pp1", 2], "ref/infer": ["tp1pp1", 2]},
}
"""Ranks a sequence: the actor's 1, 2, 2, 4, 1; the reference's 1, 1, 1, 2, 1."""
KEPT = {
    1: {"actor/train": ["tp1pp1", 2]},
    2: {**FOUR, "actor/train": ["tp2pp1", 4], "ref/infer": ["tp4pp1", 4]},
    3: {**TWO, "actor/train": ["tp2pp1", 2], "ref/infer": ["tp1pp1", 2]},
}
"""Two ranks a sequence throughout, whatever the shard groups."""
CRITIC = {
    1: {"critic/train": ["tp2pp1", 2]},
    2: {"actor/train": ["tp2pp1", 2], "critic/train": ["tp1pp1", 2]},
}
"""Of PPO: the critic alone, then the actor in its place; micro-batches are cut by tokens."""
BY_TOKENS = (
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    "critic.ppo_max_token_len_per_gpu=512",
    "critic.fsdp.fsdp_size=1",
)
PLANS = {"followed": FOLLOWED, "kept": KEPT, "critic": CRITIC}
FIGURES_HERE = (*FIGURES, "actor/kl_loss")


@pytest.fixture(scope="module")
def jobs(launch):
    """Return a job by name, run when it is first asked for."""
    shape = {"reference": True, "steps": STEPS}
    forced = {**shape, "ray_devices": 4}

    def followed():
        more = (*FORCED, REFERENCE(1), "+nereus.backend.ulysses=follow")
        return launch("followed", *more, plans=FOLLOWED, packed=1, shard_size=1, **forced)

    def critic():
        more = (*FORCED, REFERENCE(1), "+nereus.backend.ulysses=follow", *BY_TOKENS)
        here = {"packed": 1, "shard_size": 1, "critic": True, "steps": 3}
        return launch("critic", *more, plans=CRITIC, **here)

    def stock(name, devices, degree):
        whole = {"nereus": False, "devices": devices, "packed": degree, "shard_size": degree}
        return launch(name, REFERENCE(degree), **shape, **whole)

    known = {
        "followed": followed,
        "critic": critic,
        "kept": lambda: launch("kept", *FORCED, plans=KEPT, packed=2, **forced),
        "fixed": lambda: stock("fixed", 2, 1),
        "wide": lambda: stock("wide", 4, 2),
    }
    ran = {}

    def job(name):
        if name not in ran:
            ran[name] = known[name]()
            assert ran[name].ran.returncode == 0, ran[name].ran.output[-4000:]
        return ran[name]

    return job


@pytest.fixture(scope="module", params=PLANS)
def case(request, jobs):
    name = request.param
    return SimpleNamespace(name=name, plans=PLANS[name], job=jobs(name))


def degrees(case, step):
    """Say how many ranks are to share a sequence of each role after a step, and how many are."""
    roles = ("actor", "ref", "critic") if case.name == "critic" else ("actor", "ref")
    found, world = dict.fromkeys(roles, 2 if case.name == "kept" else 1), 2
    for at in range(1, step + 1):
        plan = case.plans[at]
        world = plan.get("actor/generate", (None, world))[1]
        for stage, (layout, _) in plan.items():
            if case.name != "kept" and stage != "actor/generate":
                found[stage.partition("/")[0]] = int(layout[2])
    return found, world


def test_every_transition_was_done(case):
    outcomes = [e.outcome for e in case.job.events if isinstance(e, TransitionFinished)]
    assert outcomes == ["done"] * len(case.plans)
    assert [record["world"] for record in case.job.forced] == [
        degrees(case, step)[1] for step in case.plans
    ]


def test_parameters_moments_and_schedules_are_the_same_bit_for_bit(case):
    for record in case.job.forced:
        assert {n.split("/")[1] for n in record["before"]} >= {"param", "exp_avg", "exp_avg_sq"}
        assert record["before"] == record["after"], f"after step {record['step']}"


def test_ranks_share_sequences_as_they_should(case):
    for record in case.job.forced:
        wanted, world = degrees(case, record["step"])
        assert len(record["shared"]) == world
        for rank, told in enumerate(record["shared"]):
            assert told["degrees"] == wanted, f"rank {rank} after step {record['step']}"
            assert told["outside"]  # nothing of the last engine's is left behind
            assert told["patch"] == "verl.models.transformers.monkey_patch"
            for role, degree in wanted.items():  # who gets which part, and who answers for it
                assert told["parts"][role] == [rank // degree, rank % degree == 0]


def meshes(case, record):
    """Count the process groups, beside the world's, of every mesh that a rank should be in.

    torch takes the world's for a dimension of all ranks, and gives a single rank one of its own.
    """
    degree, world = degrees(case, record["step"])
    unit = {stage: int(p["layout"][2]) for stage, p in record["plan"].items()}
    found = sum(size != world for size in (world // unit["actor/generate"], unit["actor/generate"]))
    found += 1  # the rollout's third dimension
    for stage, size in unit.items():
        role = stage.partition("/")[0]
        if stage == "actor/generate":
            continue
        if size != world:
            found += sum(n != world for n in (world // size, size))
        if degree[role] > 1:
            found += sum(n != world for n in (world // degree[role], degree[role]))
    return found


def test_ranks_leave_the_process_groups_of_engines_that_went(case):
    """On accelerators each holds memory."""
    for record in case.job.forced:
        wanted = [1 + meshes(case, record)] * len(record["shared"])
        assert [told["groups"] for told in record["shared"]] == wanted, record["step"]


def test_engines_that_went_are_out_of_memory_when_the_job_goes_on(case):
    """Asked before anything but the switch has collected garbage."""
    for record in case.job.forced:
        assert [told["lingering"] for told in record["shared"]] == [[]] * len(record["shared"])


def test_each_rank_attends_with_its_part_of_the_heads(case):
    """Of four heads: that is what sharing a sequence means for attention."""
    for record in case.job.forced:
        before, _ = degrees(case, record["step"] - 1)
        for told in record["shared_before"]:
            assert told["heads"] == sorted({4 // degree for degree in before.values()})


@pytest.mark.parametrize("name", ["followed", "kept"])
def test_the_job_learns_what_the_fixed_job_learns(name, jobs):
    """It strays no further than a few times as far as a job that shares sequences all along."""
    job = jobs(name)
    fixed, wide = jobs("fixed").ran.metrics, jobs("wide").ran.metrics
    limits = allowed(gaps(fixed, wide, FIGURES_HERE))
    assert max(limits.values()) < TELLING, limits
    assert min(job.series("actor/grad_norm", STEPS)) > 0.01  # there is something to learn
    found = gaps(fixed, job.ran.metrics, FIGURES_HERE)
    print(f"the {name} job differs by {found}, allowed {limits}")
    strayed = {name: (gap, limits[name]) for name, gap in found.items() if gap > limits[name]}
    assert not strayed, f"(difference, allowed): {strayed}"
