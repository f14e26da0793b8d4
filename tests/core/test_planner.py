from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from nereus_core.capabilities import Capabilities, Feature, unsupported
from nereus_core.cluster import Cluster, Device
from nereus_core.config import ConstraintsConfig
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.step import options_of
from nereus_core.cost.transition import plan_bytes_to_move
from nereus_core.device_specs import (
    CPU_SEAT,
    H100_SXM,
    INFINIBAND_NDR,
    LOOPBACK,
    NVLINK4,
)
from nereus_core.errors import ConfigError, NoFeasiblePlan
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.planner import Constraints, best, still_good
from nereus_core.planner.choices import choices_of
from nereus_core.planner.groups import Shape, packed
from nereus_core.sim.models import LLAMA_3_1_8B, TINY
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    BFLOAT16_MIXED,
    REF_INFER,
    Job,
    Stage,
    grpo,
    ppo,
)

SEATS = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
LENGTHS = Lengths(32, 128, 192, 256)
# 9 heads and 3 kv heads: tp 1, 3 or 9, never 2 (the shapes of SmolLM2-135M).
SMOL = ModelSpec("smol", "llama", 30, 576, 1536, 9, 3, 64, 49152, tied_embeddings=True)


def job_of(model=TINY, cluster=SEATS, batch=32, workload=None, **more):
    models = {"actor": model, "ref": model, "critic": model.as_critic("critic")}
    return Job(workload or grpo(), models, cluster, batch, 64, 256, **more)


def large(nodes: int, workload=None, **more) -> CostModel:
    cluster = Cluster.homogeneous(nodes, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
    job = job_of(LLAMA_3_1_8B, cluster, 512, workload or ppo(), precision=BFLOAT16_MIXED, **more)
    return CostModel(job)


def nodes_of(*counts: int) -> tuple[Device, ...]:
    return tuple(Device(f"node{n}", i) for n, count in enumerate(counts) for i in range(count))


def test_plans_are_valid_fit_and_do_not_depend_on_when_they_are_made():
    cost, lengths = large(4), Lengths(512, 2000, 4000, 8000)
    one, two = (best(cost, lengths, Constraints()) for _ in range(2))
    assert one == two
    assert one.runner_ups == two.runner_ups
    assert not plan_problems(one.best.plan, cost.job)
    assert cost.memory_problem(one.best.plan, lengths) is None
    assert one.best.step == cost.step(one.best.plan, lengths)


def test_tensor_parallel_ranks_stay_inside_a_node():
    cost = large(2, workload=grpo())
    short = replace(cost.job.cluster, failed=frozenset({Device("node0", 3), Device("node1", 0)}))
    plan = best(
        cost.on(cost.job.on(short)), Lengths(512, 1000, 2000, 4000), Constraints()
    ).best.plan
    assert not plan_problems(plan, cost.job.on(short))
    for placement in plan.values():
        for unit in placement.units:
            tp = placement.layout.tp
            for i in range(0, len(unit), tp):
                assert len({d.node for d in unit[i : i + tp]}) == 1


@pytest.mark.parametrize("lost", range(4))
def test_any_three_of_four_seats_get_a_plan_near_to_what_ran(lost):
    cost = CostModel(job_of())
    before = best(cost, LENGTHS, Constraints()).best.plan
    left = cost.on(cost.job.on(SEATS.without([SEATS.devices[lost]])))
    after = best(left, LENGTHS, Constraints(), before).best.plan
    assert not plan_problems(after, left.job)
    for stage in after:
        units = set(before[stage].units)
        if after[stage].layout == before[stage].layout:
            assert sum(u in units for u in after[stage].units) >= after[stage].dp - 1


def test_divisors_open_tp_3_and_powers_of_two_do_not():
    job = job_of(SMOL, Cluster.homogeneous(1, 3, CPU_SEAT, LOOPBACK, LOOPBACK), batch=4)
    cost = CostModel(job)
    three = Constraints(degrees="divisors", pinned={ACTOR_TRAIN: Layout(3, 1)})
    assert best(cost, LENGTHS, three).best.plan[ACTOR_TRAIN].layout == Layout(3, 1)
    for constraints in (Constraints(), Constraints(degrees="divisors")):
        plan = best(cost, LENGTHS, constraints).best.plan
        assert not plan_problems(plan, job)
    assert all(p.layout.tp == 1 for p in best(cost, LENGTHS, Constraints()).best.plan.values())


def test_a_stage_need_not_use_all_devices_of_its_group():
    job = job_of(batch=3)  # no number of units but 1 and 3
    plan = best(CostModel(job), LENGTHS, Constraints(max_tp=1, max_pp=1)).best.plan
    assert all(p.dp in (1, 3) for p in plan.values())


def test_the_current_plan_is_kept_when_nothing_is_faster_even_on_odd_devices():
    cost = CostModel(job_of())
    plan = best(cost, LENGTHS, Constraints()).best.plan
    swap = dict(zip(SEATS.devices, reversed(SEATS.devices), strict=True))
    mirrored = Plan(
        {
            s: Placement(p.layout, tuple(tuple(swap[d] for d in u) for u in p.units))
            for s, p in plan.items()
        }
    )
    assert best(cost, LENGTHS, Constraints(), mirrored).best.plan == mirrored


def test_ties_are_broken_by_fewest_bytes_to_move():
    cost = CostModel(job_of())
    fast = best(cost, LENGTHS, Constraints()).best.plan
    # The train stage runs in the best layout already, with its seats in another order.
    order = SEATS.devices[::-1]
    train = packed(fast[ACTOR_TRAIN].layout, fast[ACTOR_TRAIN].dp, order)
    slow = Placement.packed(Layout(1, 4), SEATS.devices)
    current = Plan({ACTOR_GENERATE: slow, REF_INFER: slow, ACTOR_TRAIN: train})
    planned = best(cost, LENGTHS, Constraints(), current).best
    assert planned.step.step.mean_s <= cost.step(fast, LENGTHS).step.mean_s * (1 + 1e-9)
    moved = plan_bytes_to_move(cost.job, current, planned.plan)
    assert moved <= plan_bytes_to_move(cost.job, current, fast)
    assert planned.plan[ACTOR_TRAIN] == train


def test_runner_ups_are_distinct_and_say_why_they_lost():
    cost, lengths = large(4), Lengths(512, 2000, 4000, 8000)
    current = Plan(
        dict.fromkeys(
            cost.job.workload.stages, Placement.packed(Layout(8, 1), cost.job.cluster.devices)
        )
    )
    planned = best(cost, lengths, Constraints(), current)
    plans = [planned.best.plan, *(r.plan for r in planned.runner_ups)]
    assert len(set(plans)) == len(plans) >= 4
    for other in planned.runner_ups:
        assert "slower by" in other.reason or "does not fit: node" in other.reason
        if "slower" in other.reason:
            assert other.predicted_s > planned.best.step.step.mean_s
    assert any("the current plan" in r.reason for r in planned.runner_ups)


def test_colocated_stages_share_devices_and_pinned_layouts_stay():
    cost = CostModel(job_of(workload=ppo()))
    pair = frozenset({ACTOR_TRAIN, REF_INFER})
    constraints = Constraints(colocate=(pair,), pinned={REF_INFER: Layout(2, 2)}, max_tp=2)
    plan = best(cost, LENGTHS, constraints).best.plan
    assert plan.sharing(ACTOR_TRAIN, REF_INFER)
    assert plan[REF_INFER].layout == Layout(2, 2)
    assert all(p.layout.tp <= 2 for p in plan.values())


def test_stages_that_must_be_apart_share_no_device():
    cost = CostModel(job_of())
    free = best(cost, LENGTHS, Constraints()).best
    everything = Constraints(apart=(frozenset(cost.job.workload.stages),))
    planned = best(cost, LENGTHS, everything)
    plan = planned.best.plan
    assert sum(len(p.devices) for p in plan.values()) == len(plan.devices)
    assert planned.best.step.step.mean_s >= free.step.step.mean_s
    assert everything.allows(plan, None)
    assert everything.allows(free.plan, None) == (plan == free.plan)
    pair = Constraints(apart=(frozenset({ACTOR_TRAIN, REF_INFER}),))
    assert not best(cost, LENGTHS, pair).best.plan.sharing(ACTOR_TRAIN, REF_INFER)


def test_a_least_number_of_units_is_kept_as_far_as_devices_and_memory_allow():
    asked = Constraints(min_dp={ACTOR_TRAIN: 4}, pinned={ACTOR_TRAIN: Layout(1, 1)})
    cost = CostModel(job_of())
    planned = best(cost, LENGTHS, asked)
    assert (planned.best.plan[ACTOR_TRAIN].dp, planned.relaxed) == (4, ())
    left = cost.on(cost.job.on(SEATS.without(SEATS.devices[:2])))
    fewer = best(left, LENGTHS, asked)
    assert fewer.best.plan[ACTOR_TRAIN].dp == 2
    assert fewer.relaxed == ("actor/train has 2 of the 4 units asked for at least",)
    assert still_good(left, LENGTHS, asked, fewer.best.plan, 10.0)
    alone = replace(fewer.best.plan[ACTOR_TRAIN], units=fewer.best.plan[ACTOR_TRAIN].units[:1])
    single = Plan({**fewer.best.plan, ACTOR_TRAIN: alone})
    assert not still_good(left, LENGTHS, asked, single, 10.0)
    assert best(left, LENGTHS, asked, single).best.plan[ACTOR_TRAIN].dp == 2


def test_a_least_number_of_units_gives_way_to_memory():
    cost, lengths = large(1, workload=grpo()), Lengths(512, 1000, 2000, 4000)
    small = replace(cost.job.cluster, device_spec=replace(H100_SXM, memory_bytes=40 * 2**30))
    cost = cost.on(cost.job.on(small))
    planned = best(cost, lengths, Constraints(min_dp={ACTOR_TRAIN: 8}))
    assert planned.best.plan[ACTOR_TRAIN].dp < 8
    assert planned.relaxed[0].startswith("actor/train has ")


def test_excluded_devices_are_not_used():
    cost = CostModel(job_of())
    away = frozenset(SEATS.devices[:2])
    assert best(cost, LENGTHS, Constraints().excluding(away)).best.plan.devices.isdisjoint(away)


def test_an_engine_whose_layout_is_fixed_keeps_it():
    everything = Capabilities.everything()
    fixed = unsupported("an engine's tp is fixed at start")
    table = replace(
        everything,
        split={**everything.split, Stage.GENERATE: fixed},
        merge={**everything.merge, Stage.GENERATE: fixed},
    )
    constraints = Constraints.of(ConstraintsConfig(), table, None)
    cost = CostModel(job_of())
    slow = Placement.packed(Layout(4, 1), SEATS.devices)
    current = Plan(dict.fromkeys(cost.job.workload.stages, slow))
    plan = best(cost, LENGTHS, constraints, current).best.plan
    assert plan[ACTOR_GENERATE].layout == Layout(4, 1)
    assert plan[ACTOR_TRAIN].layout != Layout(4, 1)
    assert best(cost, LENGTHS, Constraints(), current).best.plan[ACTOR_GENERATE].layout != Layout(
        4, 1
    )


def test_features_that_an_adapter_lacks_are_not_planned_with():
    everything = Capabilities.everything()
    table = replace(
        everything,
        features={
            **everything.features,
            Feature.PIPELINE_STAGES: unsupported("for this test"),
            Feature.COLOCATED_STAGES: unsupported("for this test"),
        },
    )
    constraints = Constraints.of(ConstraintsConfig(max_pp=4), table, None)
    assert (constraints.max_pp, constraints.colocation) == (1, False)
    plan = best(CostModel(job_of()), LENGTHS, constraints).best.plan
    assert all(placement.layout.pp == 1 for placement in plan.values())
    assert not any(plan.sharing(one, other) for one, other in combinations(plan, 2))
    free = Constraints.of(ConstraintsConfig(max_pp=4), everything, None)
    assert (free.max_pp, free.colocation) == (4, True)
    with pytest.raises(ConfigError, match=r"ref/infer is pinned .* pp > 1"):
        Constraints.of(ConstraintsConfig(pin={"ref/infer": "tp1pp2"}), table, None)


def test_a_small_group_goes_first_where_the_large_one_would_leave_it_no_node():
    devices = tuple(Device(f"node{n}", i) for n in range(3) for i in range(2))
    cluster = replace(SEATS, devices=devices)
    job = replace(job_of(), cluster=cluster, within_node=frozenset({ACTOR_GENERATE}))
    pinned = {ACTOR_TRAIN: Layout(1, 3), ACTOR_GENERATE: Layout(1, 2), REF_INFER: Layout(1, 1)}
    constraints = Constraints(degrees="divisors", pinned=pinned, colocation=False)
    plan = best(CostModel(job), LENGTHS, constraints).best.plan
    assert not plan_problems(plan, job)


def test_a_lost_unit_is_no_reason_to_need_what_the_adapter_cannot_do():
    everything = Capabilities.everything()
    never = dict.fromkeys(Stage, unsupported("for this test"))
    table = replace(everything, split=never, merge=never, extend=never, destroy=never)
    constraints = Constraints.of(ConstraintsConfig(), table, None)
    cost = CostModel(job_of())
    one_each = Placement.packed(Layout(1, 1), SEATS.devices)
    current = Plan(dict.fromkeys(cost.job.workload.stages, one_each))
    halved = cost.on(cost.job.on(SEATS.without(SEATS.devices[2:])))
    kept = best(halved, LENGTHS, constraints, current).best.plan
    assert all(p.units == one_each.units[:2] for p in kept.values())
    # A unit that is gone altogether is made anew in whatever layout fits.
    whole = Plan(dict.fromkeys(current, Placement.packed(Layout(4, 1), SEATS.devices)))
    assert best(halved, LENGTHS, constraints, whole).best.plan.devices <= set(SEATS.devices[:2])


def test_constraints_name_the_key_that_cannot_be_read():
    config = ConstraintsConfig(pin={"actor/train": "tp2"})
    with pytest.raises(ConfigError, match=r"constraints\.pin: .*'tp2'"):
        Constraints.of(config, Capabilities.everything(), None)


def test_what_fits_nowhere_is_refused_with_the_nearest_plan():
    small = replace(CPU_SEAT, memory_bytes=2**20)
    cost = CostModel(job_of(cluster=replace(SEATS, device_spec=small)))
    with pytest.raises(NoFeasiblePlan, match=r"4 healthy devices.*node0:\d needs .* has 0\.00 GiB"):
        best(cost, LENGTHS, Constraints())


def test_constraints_that_leave_nothing_are_named():
    with pytest.raises(NoFeasiblePlan, match="actor/train is pinned to tp3pp1 and tp=3 does not"):
        best(CostModel(job_of()), LENGTHS, Constraints(pinned={ACTOR_TRAIN: Layout(3, 1)}))
    none = CostModel(job_of(cluster=SEATS.without(SEATS.devices)))
    with pytest.raises(NoFeasiblePlan, match="no device is healthy"):
        best(none, LENGTHS, Constraints())


def test_memory_decides_where_speed_alone_would_not():
    lengths = Lengths(512, 2000, 4000, 8000)
    roomy, tight = large(4), large(4)
    tight = tight.on(
        tight.job.on(
            replace(tight.job.cluster, device_spec=replace(H100_SXM, memory_bytes=48 * 2**30))
        )
    )
    fast, fits = (best(c, lengths, Constraints()).best for c in (roomy, tight))
    assert fits.step.step.mean_s > fast.step.step.mean_s
    assert tight.memory_problem(fast.plan, lengths) is not None


def test_still_good_never_contradicts_the_search():
    for lengths in (Lengths(512, 500, 900, 1024), Lengths(512, 6000, 9000, 16000)):
        cost = large(1, workload=grpo())
        planned = best(cost, lengths, Constraints())
        for other in (planned.best, *planned.runner_ups):
            for delta in (0.01, 0.1, 1.0, 10.0):
                if still_good(cost, lengths, Constraints(), other.plan, delta):
                    mean_s = cost.step(other.plan, lengths).step.mean_s
                    assert mean_s <= (1 + delta) * planned.best.step.step.mean_s


def test_still_good_tells_good_from_bad_and_refuses_what_does_not_fit():
    cost = CostModel(job_of())
    good = best(cost, LENGTHS, Constraints()).best.plan
    slow = Plan(dict.fromkeys(good, Placement.packed(Layout(4, 1), SEATS.devices)))
    assert still_good(cost, LENGTHS, Constraints(), good, 0.1)
    assert not still_good(cost, LENGTHS, Constraints(), slow, 0.1)
    lost = cost.on(cost.job.on(SEATS.without(SEATS.devices[:1])))
    assert not still_good(lost, LENGTHS, Constraints(), good, 10.0)


def test_an_asynchronous_job_separates_generation_from_training():
    tail = Lengths(512, 500, 2000, 8000)  # few devices end a tail as late as many
    overlapped, ordered = large(4, workload=grpo(asynchronous=True)), large(4, workload=grpo())
    found, other = (best(c, tail, Constraints()).best for c in (overlapped, ordered))
    assert not found.plan.sharing(ACTOR_GENERATE, ACTOR_TRAIN)
    assert found.step.step.mean_s < other.step.step.mean_s


@pytest.mark.parametrize("counts", [(3, 4), (1, 2, 4), (5,), (2, 2, 1)])
def test_a_shape_says_what_packing_does(counts):
    devices = nodes_of(*counts)
    shape = Shape.of(list(counts))
    for tp in (1, 2, 3, 4):
        for pp in (1, 2, 3):
            for dp in (1, 2, 3):
                placement = packed(Layout(tp, pp), dp, devices)
                column = [np.array([n]) for n in (tp, pp, dp)]
                fits, pp_crosses, dp_crosses = shape.fitted(*column)
                assert fits[0] == (placement is not None)
                if placement is not None:
                    options = options_of(placement)
                    assert not options.tp_crosses[0]
                    assert options.pp_crosses[0] == pp_crosses[0], (tp, pp, dp)
                    assert options.dp_crosses[0] == dp_crosses[0], (tp, pp, dp)


@pytest.mark.parametrize(("num_devices", "least"), [(4, 2), (2, 2), (1, 1)])
def test_a_least_number_of_units_is_kept_as_far_as_devices_allow(num_devices, least):
    cluster = Cluster.homogeneous(1, num_devices, CPU_SEAT, LOOPBACK, LOOPBACK)
    job = Job(grpo(), {"actor": TINY, "ref": TINY}, cluster, 8, 16, 16)
    constraints = Constraints(min_dp={ACTOR_TRAIN: 2})
    plan = best(CostModel(job), Lengths.of_job(job), constraints).best.plan
    assert plan[ACTOR_TRAIN].dp >= least
    assert constraints.missing_units(plan) == 2 - least


def test_no_choice_breaks_what_a_framework_asks_of_units():
    job = Job(grpo(), {"actor": TINY, "ref": TINY}, SEATS, 8, 16, 16)
    free = set(choices_of(job, Constraints(), None, ACTOR_TRAIN, (4,)))
    assert (4, 1, 1) in free
    assert (1, 1, 4) in free
    asked = replace(job, kv_heads_cut=frozenset({ACTOR_TRAIN}), unit_batch=2)
    left = set(choices_of(asked, Constraints(), None, ACTOR_TRAIN, (4,)))
    assert left == {c for c in free if c[0] < 4 and c[2] in (1, 2)}
    assert set(choices_of(asked, Constraints(), None, ACTOR_GENERATE, (4,))) == free
