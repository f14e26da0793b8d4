"""Stages in one set of processes, and batches shared out by device: against exhaustive search."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from planner_cases import small_problem

from nereus_core.cost import CostModel
from nereus_core.errors import NoFeasiblePlan
from nereus_core.layout import Layout, stage_problems
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.planner import Constraints, best
from nereus_core.planner.groups import packed
from nereus_core.workload import Stage, TokenBudget


def shared_out(job, stage, devices, dp) -> bool:
    if stage.stage is Stage.GENERATE:
        return True
    if job.unit_batch is not None:
        budget = job.micro_tokens.get(stage)
        longest = job.max_prompt_tokens + job.max_response_tokens
        holds = budget is None or budget.least * (devices // dp) >= longest
        return job.unit_batch % dp == 0 and holds
    pairs = job.sequence_ranks.get(stage, 1)
    return job.device_batch is None or (job.device_batch % devices == 0 and devices % pairs == 0)


def placements(job, stage, devices) -> list[Placement]:
    """Every way to lay a stage out on exactly these devices."""
    found = []
    for tp, pp, dp in product([1, 2, 4, 8], [1, 2, 4, 8], range(1, len(devices) + 1)):
        layout = Layout(tp, pp)
        if (
            tp * pp * dp == len(devices)
            and job.global_batch % dp == 0
            and shared_out(job, stage, len(devices), dp)
            and not stage_problems(job, stage, layout)
            and (placement := packed(layout, dp, devices)) is not None
        ):
            found.append(placement)
    return found


def exhaustive_s(cost, lengths):
    """Fewest seconds over all stages on one common set of devices, in every size of it."""
    job, found = cost.job, float("inf")
    nodes: dict[str, list] = {}
    for device in job.cluster.healthy:
        nodes.setdefault(device.node, []).append(device)
    devices = [d for node in sorted(nodes.values(), key=len, reverse=True) for d in node]
    for size in range(1, len(devices) + 1):
        own = [placements(job, stage, devices[:size]) for stage in job.workload.stages]
        for combination in product(*own):
            plan = Plan(dict(zip(job.workload.stages, combination, strict=True)))
            if cost.memory_problem(plan, lengths) is None:
                found = min(found, cost.step(plan, lengths).step.mean_s)
    return found


def by_device(job, seed):
    return {"device_batch": job.global_batch // (1 + seed % 2)}


def by_rows(job, seed):
    """Any number of ranks may hold a copy, whatever heads there are."""
    cut = frozenset(s for s in job.workload.stages if s.stage is not Stage.GENERATE)
    return {**by_device(job, seed), "row_cut": cut}


def in_pairs(job, seed):
    """Of one stage two devices share each sequence."""
    training = [s for s in job.workload.stages if s.stage is Stage.TRAIN]
    return {"device_batch": job.global_batch, "sequence_ranks": {training[seed % len(training)]: 2}}


def by_unit(job, seed):
    return {"unit_batch": max(1, job.global_batch // 2), "sequence_parallel": True}


def by_tokens(job, seed):
    """As by unit, and micro-batches of a stage take no whole sequence on fewer than two ranks."""
    longest = job.max_prompt_tokens + job.max_response_tokens
    training = [s for s in job.workload.stages if s.stage is not Stage.GENERATE]
    short = TokenBudget(longest // 2 + 1, longest)
    return {**by_unit(job, seed), "micro_tokens": {training[seed % len(training)]: short}}


@pytest.mark.parametrize("ways", [by_device, by_rows, in_pairs, by_unit, by_tokens])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_plan_with_all_stages_in_the_same_processes_is_exact(seed, ways):
    cost, lengths = small_problem(seed)
    stages = frozenset(cost.job.workload.stages)
    job = replace(cost.job, together=(stages,), **ways(cost.job, seed))
    cost = CostModel(job)
    expected = exhaustive_s(cost, lengths)
    try:
        found = best(cost, lengths, Constraints()).best
    except NoFeasiblePlan:
        assert expected == float("inf")
        return
    assert not plan_problems(found.plan, job)
    assert found.step.step.mean_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_no_stage_gets_its_devices_back_without_those_it_lives_with(seed):
    cost, lengths = small_problem(seed)
    job = replace(cost.job, together=(frozenset(cost.job.workload.stages),))
    cost = CostModel(job)
    alone = Placement(Layout(), (job.cluster.healthy[:1],))
    current = Plan(dict.fromkeys(job.workload.stages, alone))
    try:
        found = best(cost, lengths, Constraints(), current).best
    except NoFeasiblePlan:
        return
    assert not plan_problems(found.plan, job)


def test_a_plan_that_parts_them_or_does_not_divide_is_a_problem():
    cost, _ = small_problem(0)
    stages = cost.job.workload.stages
    devices = list(cost.job.cluster.healthy)
    one, other = (packed(Layout(), 1, devices[start:]) for start in (0, 1))
    plan = Plan({stage: one if i else other for i, stage in enumerate(stages)})
    job = replace(cost.job, together=(frozenset(stages),), device_batch=cost.job.global_batch)
    assert any("same devices" in p for p in plan_problems(plan, job))
    odd = replace(cost.job, device_batch=7)
    two = Plan(dict.fromkeys(stages, packed(Layout(), 2, devices)))
    assert any("do not divide 7 sequences" in p for p in plan_problems(two, odd))
    units = replace(cost.job, unit_batch=7)
    assert any("2 units do not divide 7 sequences" in p for p in plan_problems(two, units))
    tokens = replace(units, unit_batch=8, sequence_parallel=True)
    budget = TokenBudget(job.longest_tokens - 1, job.longest_tokens)
    tokens = replace(tokens, micro_tokens=dict.fromkeys(stages, budget))
    assert any(f"take a sequence of {job.longest_tokens}" in p for p in plan_problems(two, tokens))
    train = next(stage for stage in stages if stage.stage is Stage.TRAIN)
    alone = replace(cost.job, device_batch=8, sequence_ranks={train: 2})
    single = Plan(dict.fromkeys(stages, packed(Layout(), 1, devices)))
    assert [p for p in plan_problems(single, alone) if "share each sequence" in p] == [
        f"{train}: 2 ranks that share each sequence do not divide 1 devices"
    ]
