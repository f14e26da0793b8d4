"""Laws that any cost model obeys: monotone, dimensionally consistent, blind to names."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_core.cluster import Cluster, Device
from nereus_core.cost import CostModel, Lengths, OpClass
from nereus_core.cost.op_classes import INDEX
from nereus_core.device_specs import CPU_SEAT, H100_SXM, INFINIBAND_NDR, LOOPBACK, NVLINK4
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import BFLOAT16_MIXED, Job, grpo, ppo

LAYOUTS = st.sampled_from([Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(4, 2), Layout(8, 1)])
LENGTHS = st.builds(
    lambda prompt, mean, tail: Lengths(prompt, mean, mean * tail, mean * tail * 1.5),
    st.floats(1, 4096), st.floats(1, 8192), st.floats(1, 4),
)  # fmt: skip


@st.composite
def cases(draw):
    """A job, a plan of it and lengths."""
    spec, intra, inter = draw(
        st.sampled_from([(H100_SXM, NVLINK4, INFINIBAND_NDR), (CPU_SEAT, LOOPBACK, LOOPBACK)])
    )
    cluster = Cluster.homogeneous(2, 8, spec, intra, inter)
    workload = draw(st.sampled_from([ppo(), grpo()]))
    critic = LLAMA_3_1_8B.as_critic("critic")
    models = {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B, "critic": critic}
    job = Job(
        workload, models, cluster, 64, 4096, 8192, BFLOAT16_MIXED,
        recompute=draw(st.sampled_from(["none", "full"])), sharded_optimizer=draw(st.booleans()),
    )  # fmt: skip
    halves = [cluster.devices[:8], cluster.devices[8:], cluster.devices]
    stages = {
        s: Placement.packed(draw(LAYOUTS), draw(st.sampled_from(halves))) for s in workload.stages
    }
    return job, Plan(stages), draw(LENGTHS)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(list(OpClass)), st.floats(0.01, 1.0))
def test_more_efficiency_is_never_slower(case, op_class, by):
    job, plan, lengths = case
    cost = CostModel(job)
    log = cost.efficiencies.log_inverse.copy()
    log[INDEX[op_class]] *= 1 - by
    better = replace(cost, efficiencies=replace(cost.efficiencies, log_inverse=log))
    assert better.step(plan, lengths).step.mean_s <= cost.step(plan, lengths).step.mean_s * (
        1 + 1e-12
    )


@settings(max_examples=40, deadline=None)
@given(cases(), st.floats(1.0, 4.0))
def test_more_memory_never_makes_a_plan_infeasible_nor_slower(case, factor):
    job, plan, lengths = case
    spec = job.cluster.device_spec
    larger = replace(spec, memory_bytes=int(spec.memory_bytes * factor))
    before = CostModel(job)
    after = CostModel(job.on(replace(job.cluster, device_spec=larger)))
    if before.memory_problem(plan, lengths) is None:
        assert after.memory_problem(plan, lengths) is None
        assert after.step(plan, lengths).step.mean_s <= before.step(plan, lengths).step.mean_s * (
            1 + 1e-12
        )


@settings(max_examples=30, deadline=None)
@given(cases(), st.floats(0.25, 4.0))
def test_a_machine_c_times_as_fast_takes_a_c_th_of_the_time(case, c):
    job, plan, lengths = case

    def link(spec):
        # Under a name nobody measured: measured curves are facts of their own link.
        return replace(
            spec, name="any", bytes_per_s=spec.bytes_per_s * c, latency_s=spec.latency_s / c
        )

    spec = replace(job.cluster.device_spec, name="any")
    slow = replace(
        job.cluster,
        device_spec=spec,
        intra_node=replace(job.cluster.intra_node, name="any"),
        inter_node=replace(job.cluster.inter_node, name="any"),
    )
    fast = replace(
        slow,
        device_spec=replace(
            spec,
            peak_flops_per_s=spec.peak_flops_per_s * c,
            memory_bytes_per_s=spec.memory_bytes_per_s * c,
            launch_s=spec.launch_s / c,
            host_bytes_per_s=spec.host_bytes_per_s * c,
        ),
        intra_node=link(slow.intra_node),
        inter_node=link(slow.inter_node),
    )
    fixed = INDEX[OpClass.FIXED]  # seconds of their own, not work
    before = CostModel(job.on(slow))
    log = before.efficiencies.log_inverse.copy()
    log[fixed] = -80.0
    table = replace(before.efficiencies, log_inverse=log)
    one = CostModel(job.on(slow), table).step(plan, lengths).stage_s
    other = CostModel(job.on(fast), table).step(plan, lengths).stage_s
    for stage, seconds in one.items():
        assert other[stage] * c == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_names_of_nodes_do_not_matter(case, random):
    job, plan, lengths = case
    names = ["alpha", "beta"]
    random.shuffle(names)
    new = {d: Device(names[int(d.node.removeprefix("node"))], d.index) for d in job.cluster.devices}
    renamed = Plan(
        {
            s: replace(p, units=tuple(tuple(new[d] for d in unit) for unit in p.units))
            for s, p in plan.items()
        }
    )
    cluster = replace(job.cluster, devices=tuple(new[d] for d in job.cluster.devices))
    one, other = CostModel(job), CostModel(job.on(cluster))
    assert other.step(renamed, lengths).step == one.step(plan, lengths).step
    before, after = one.memory(plan, lengths), other.memory(renamed, lengths)
    assert {new[d]: size for d, size in before.items()} == dict(after)


def test_every_class_has_a_finite_prior():
    job = Job(
        grpo(), {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B},
        Cluster.homogeneous(1, 8, H100_SXM, NVLINK4, INFINIBAND_NDR), 64, 1, 1, BFLOAT16_MIXED,
    )  # fmt: skip
    assert np.isfinite(CostModel(job).efficiencies.inverse).all()
