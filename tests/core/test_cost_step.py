from dataclasses import replace

import pytest

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel, Interval, Lengths
from nereus_core.cost.step import levels, makespan, regions
from nereus_core.device_specs import CPU_SEAT, H100_SXM, INFINIBAND_NDR, LOOPBACK, NVLINK4
from nereus_core.layout import Layout
from nereus_core.observation import TokenStats
from nereus_core.plan import Placement, Plan
from nereus_core.sim.models import LLAMA_3_1_8B, TINY
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    BFLOAT16_MIXED,
    CRITIC_INFER,
    REF_INFER,
    Job,
    grpo,
    ppo,
    remax,
)

TP2 = Layout(2, 1)
LENGTHS = Lengths(512, 1024, 2048, 4096)


def job_of(workload, cluster, model=LLAMA_3_1_8B, batch=128):
    models = {"actor": model, "ref": model, "critic": model.as_critic("critic")}
    return Job(workload, models, cluster, batch, 1024, 4096, BFLOAT16_MIXED)


def one_node():
    return Cluster.homogeneous(1, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)


def colocated(job, layout=TP2):
    placement = Placement.packed(layout, job.cluster.devices)
    return Plan(dict.fromkeys(job.workload.stages, placement))


def test_levels_follow_the_graph():
    assert [levels(ppo())[s] for s in ppo().stages] == [0, 1, 1, 2, 2]


def test_colocated_stages_follow_one_another_and_disjoint_ones_overlap():
    workload, devices = ppo(), one_node().devices
    busy = dict(zip(workload.stages, [8.0, 1.0, 2.0, 3.0, 4.0], strict=True))
    everywhere = Placement.packed(Layout(), devices)
    left, right = Placement.packed(Layout(), devices[:4]), Placement.packed(Layout(), devices[4:])
    together = regions(Plan(dict.fromkeys(busy, everywhere)))
    assert makespan(workload, busy, together)[0] == 18.0
    critic_apart = {s: right if s.model == "critic" else left for s in busy}
    seconds, critical = makespan(workload, busy, regions(Plan(critic_apart)))
    assert seconds == 8.0 + 2.0 + 4.0
    assert critical == (ACTOR_GENERATE, CRITIC_INFER, ACTOR_TRAIN)


def test_an_asynchronous_job_takes_the_longer_of_generation_and_training():
    devices = one_node().devices
    busy = {ACTOR_GENERATE: 8.0, REF_INFER: 1.0, ACTOR_TRAIN: 4.0}
    apart = {
        s: Placement.packed(Layout(), devices[:4] if s is ACTOR_GENERATE else devices[4:])
        for s in busy
    }
    together = dict.fromkeys(busy, Placement.packed(Layout(), devices))
    workload = grpo(asynchronous=True)
    assert makespan(workload, busy, regions(Plan(apart)))[0] == 8.0
    assert makespan(workload, {**busy, ACTOR_TRAIN: 9.0}, regions(Plan(apart)))[0] == 10.0
    assert makespan(workload, busy, regions(Plan(together)))[0] == 13.0


def test_seconds_are_linear_in_inverse_efficiency():
    job = job_of(grpo(), one_node())
    cost = CostModel(job)
    slower = replace(
        cost.efficiencies, log_inverse=cost.efficiencies.log_inverse + 0.6931471805599453
    )
    before = cost.step(colocated(job), LENGTHS).stage_s
    after = CostModel(job, slower).step(colocated(job), LENGTHS).stage_s
    for stage, seconds in before.items():
        assert after[stage] == pytest.approx(2 * seconds)


def test_training_takes_about_six_flops_per_parameter_and_token_at_least():
    job = job_of(grpo(), one_node())
    cost = CostModel(job)
    seconds = cost.step(colocated(job), LENGTHS).stage_s[ACTOR_TRAIN]
    flops = 6 * LLAMA_3_1_8B.num_params * job.global_batch * LENGTHS.total_mean
    at_peak = flops / (8 * H100_SXM.peak_flops_per_s)
    assert at_peak < seconds < 10 * at_peak


def test_longer_responses_take_longer_and_the_tail_decides_when_generation_ends():
    job = job_of(grpo(), one_node())
    left, right = job.cluster.devices[:4], job.cluster.devices[4:]
    plan = Plan(
        {
            ACTOR_GENERATE: Placement.packed(Layout(4, 1), left),
            REF_INFER: Placement.packed(Layout(4, 1), right),
            ACTOR_TRAIN: Placement.packed(Layout(4, 1), right),
        }
    )
    cost = CostModel(job)
    base = cost.step(plan, LENGTHS)
    longer = cost.step(
        plan, replace(LENGTHS, response_mean=2048, response_p95=4096, response_max=8192)
    )
    assert all(longer.stage_s[s] > base.stage_s[s] for s in plan)
    tail = cost.step(plan, replace(LENGTHS, response_max=16384))
    assert tail.stage_s[ACTOR_GENERATE] > 1.3 * base.stage_s[ACTOR_GENERATE]
    assert tail.stage_s[ACTOR_TRAIN] == pytest.approx(base.stage_s[ACTOR_TRAIN])


def test_remax_generates_twice():
    one = job_of(grpo(), one_node())
    two = job_of(remax(), one_node())
    once = CostModel(one).step(colocated(one), LENGTHS).stage_s[ACTOR_GENERATE]
    twice = CostModel(two).step(colocated(two), LENGTHS).stage_s[ACTOR_GENERATE]
    assert twice == pytest.approx(2 * once)


def test_generation_that_lacks_cache_memory_goes_in_rounds_and_takes_longer():
    roomy = job_of(grpo(), one_node(), batch=2048)
    tight = roomy.on(replace(roomy.cluster, device_spec=replace(H100_SXM, memory_bytes=40 * 2**30)))
    plan = Plan(
        {
            ACTOR_GENERATE: Placement.packed(Layout(2, 1), roomy.cluster.devices[:2]),
            REF_INFER: Placement.packed(Layout(2, 1), roomy.cluster.devices[2:4]),
            ACTOR_TRAIN: Placement.packed(Layout(4, 1), roomy.cluster.devices[4:]),
        }
    )
    fast = CostModel(roomy).step(plan, LENGTHS).stage_s[ACTOR_GENERATE]
    slow = CostModel(tight).step(plan, LENGTHS).stage_s[ACTOR_GENERATE]
    assert slow > 1.15 * fast


def test_crossing_nodes_costs():
    near = job_of(grpo(), one_node())
    far = job_of(grpo(), Cluster.homogeneous(8, 1, H100_SXM, NVLINK4, INFINIBAND_NDR))
    a = CostModel(near).step(colocated(near), LENGTHS).stage_s
    b = CostModel(far).step(colocated(far), LENGTHS).stage_s
    assert all(b[s] > a[s] for s in a)


def test_pipelines_fill_and_drain():
    cluster = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
    few, many = (job_of(grpo(), cluster, TINY, batch) for batch in (4, 64))

    def relative(job):
        alone = Plan(
            dict.fromkeys(job.workload.stages, Placement.packed(Layout(), cluster.devices[:1]))
        )
        piped = colocated(job, Layout(1, 4))
        cost = CostModel(job)
        return (
            cost.step(piped, LENGTHS).stage_s[ACTOR_TRAIN]
            / cost.step(alone, LENGTHS).stage_s[ACTOR_TRAIN]
        )

    assert relative(many) < 0.7 * relative(few)


def test_weight_sync_is_part_of_the_step_and_not_of_the_stage():
    job = job_of(grpo(), one_node())
    step = CostModel(job).step(colocated(job), LENGTHS)
    assert set(step.sync_s) == {ACTOR_GENERATE}
    assert step.step.mean_s == pytest.approx(
        sum(step.stage_s.values()) + step.sync_s[ACTOR_GENERATE]
    )


def test_lengths_are_read_from_an_observation_and_from_a_job():
    job = job_of(grpo(), one_node())
    prior = Lengths.of_job(job)
    assert (prior.prompt_mean, prior.response_mean, prior.response_max) == (1024, 2048, 4096)
    stats = TokenStats.of([1, 2, 3, 10])
    assert stats.mean <= stats.p95 <= stats.max


def test_an_interval_refuses_bounds_out_of_order():
    with pytest.raises(ValueError, match="out of order"):
        Interval(1.0, 2.0, 3.0)


def test_looks_at_one_job_share_a_model_and_another_job_has_its_own():
    job = job_of(ppo(), one_node())
    fewer = job.on(job.cluster.without(job.cluster.devices[4:]))
    cost = CostModel(job)
    assert cost.on(fewer) is cost.on(fewer)
    assert cost.on(fewer).job is fewer
    other = cost.on(job)
    assert other.job is job
    assert other.step(colocated(job), LENGTHS) == cost.step(colocated(job), LENGTHS)
