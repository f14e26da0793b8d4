"""The planner against exhaustive enumeration, written without its tables, bounds and fronts."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from nereus_core.cluster import Cluster, Device, DeviceSpec
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.step import levels, options_of
from nereus_core.cost.transition import plan_bytes_to_move
from nereus_core.device_specs import CPU_SEAT, INFINIBAND_HDR, LOOPBACK
from nereus_core.errors import NoFeasiblePlan
from nereus_core.layout import Layout, layout_problems
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.planner import Constraints, best
from nereus_core.sim.models import TINY
from nereus_core.workload import ALGORITHMS, Job, Stage


def set_partitions(items):
    if not items:
        yield []
        return
    head, *rest = items
    for smaller in set_partitions(rest):
        for i, block in enumerate(smaller):
            yield [*smaller[:i], [head, *block], *smaller[i + 1 :]]
        yield [[head], *smaller]


def pack(layout: Layout, dp: int, devices: list[Device]) -> Placement | None:
    """Tensor-parallel groups inside nodes, fullest node first, then units in a row."""
    nodes: dict[str, list[Device]] = {}
    for d in devices:
        nodes.setdefault(d.node, []).append(d)
    cut = []
    for node in sorted(nodes.values(), key=lambda n: -len(n)):
        while len(node) >= layout.tp:
            cut.append(node[: layout.tp])
            node = node[layout.tp :]
    if len(cut) < dp * layout.pp:
        return None
    units = [
        tuple(d for group in cut[u * layout.pp : (u + 1) * layout.pp] for d in group)
        for u in range(dp)
    ]
    return Placement(layout, tuple(units))


def placements(job: Job, stage, devices: list[Device], divisors: bool):
    degrees = [1, 2, 3, 4, 5, 6] if divisors else [1, 2, 4]
    for tp, pp, dp in product(degrees, degrees, range(1, len(devices) + 1)):
        layout = Layout(tp, pp)
        if job.global_batch % dp == 0 and not layout_problems(job.model(stage), layout):
            placement = pack(layout, dp, devices)
            if placement is not None:
                yield placement


def shared_ways(cost: CostModel, lengths: Lengths, block, devices, divisors):
    """Every combination of placements (and rounds of generation) of a block that fits: seconds."""
    per_stage = []
    for stage in block:
        ways = []
        for placement in placements(cost.job, stage, devices, divisors):
            table = cost.table(stage, options_of(placement), lengths)
            ways += [
                (placement, t + s, stays, runs)
                for t, s, stays, runs in zip(
                    table.seconds, table.sync_s, table.persistent_bytes, table.transient_bytes,
                    strict=True,
                )
            ]  # fmt: skip
        per_stage.append(ways)
    if not all(per_stage):
        return None
    at = np.indices([len(w) for w in per_stage]).reshape(len(block), -1)
    column = [
        [np.array([w[c] for w in ways])[i] for ways, i in zip(per_stage, at, strict=True)]
        for c in (1, 2, 3)
    ]
    fits = sum(column[1]) + np.max(column[2], axis=0) <= cost.capacity_bytes
    seconds = np.array(column[0])[:, fits]
    return (seconds, at[:, fits], per_stage) if fits.any() else None


def exhaustive(cost: CostModel, lengths: Lengths, divisors: bool):
    """Fewest seconds over all partitions, sizes and combinations, and a plan that has them."""
    job, level = cost.job, levels(cost.job.workload)
    nodes = sorted(job.cluster.nodes().values(), key=lambda n: -len(n))
    devices = [d for node in nodes for d in node]
    fewest, plan, known = np.inf, None, {}
    for blocks in set_partitions(list(job.workload.stages)):
        for sizes in product(range(1, len(devices) + 1), repeat=len(blocks)):
            if sum(sizes) > len(devices):
                continue
            spans, start = [(0, 0)] * len(blocks), 0
            for i in sorted(range(len(blocks)), key=lambda i: -sizes[i]):  # largest first
                spans[i] = (start, start + sizes[i])
                start += sizes[i]
            for block, span in zip(blocks, spans, strict=True):
                if (tuple(block), span) not in known:
                    group = devices[slice(*span)]
                    known[tuple(block), span] = shared_ways(cost, lengths, block, group, divisors)
            found = [known[tuple(b), span] for b, span in zip(blocks, spans, strict=True)]
            if any(f is None for f in found):
                continue
            at = np.indices([f[0].shape[1] for f in found]).reshape(len(blocks), -1)
            step, generating, whole = 0.0, 0.0, 0.0
            for number in sorted(set(level.values())):
                sums = [
                    sum(
                        (f[0][i][j] for i, s in enumerate(block) if level[s] == number),
                        np.zeros(at.shape[1]),
                    )
                    for f, j, block in zip(found, at, blocks, strict=True)
                ]
                whole = [a + b for a, b in zip(whole, sums, strict=True)] if whole else sums
                step = step + np.max(sums, axis=0)
                if any(level[s] == number and s.stage is Stage.GENERATE for s in level):
                    generating = generating + np.max(sums, axis=0)
            if job.workload.asynchronous:
                step = np.maximum(step - generating, np.max(whole, axis=0))
            j = int(np.argmin(step))
            if step[j] < fewest:
                fewest = float(step[j])
                plan = Plan(
                    {
                        s: f[2][i][f[1][i][at[b, j]]][0]
                        for b, (block, f) in enumerate(zip(blocks, found, strict=True))
                        for i, s in enumerate(block)
                    }
                )
    return fewest, plan


def instance(seed: int):
    draw = random.Random(seed)
    algorithm = draw.choice(["grpo", "grpo", "remax", "ppo"])
    counts = draw.choice(
        [[3], [1, 2], [4], [2, 2]]
        if algorithm == "ppo"
        else [[6], [3, 3], [4, 1], [1, 2], [5], [2, 2, 1]]
    )
    devices = tuple(Device(f"node{n}", i) for n, c in enumerate(counts) for i in range(c))
    memory = draw.choice([4, 8, 16, 1000]) * 2**18
    spec = DeviceSpec("small", CPU_SEAT.peak_flops_per_s, memory, 12e9, 5e-6, "chosen for a test")
    failed = frozenset(draw.sample(devices, draw.choice([0, 0, 1])))
    cluster = Cluster(devices, spec, LOOPBACK, INFINIBAND_HDR, failed)
    model = TINY
    job = Job(
        ALGORITHMS[algorithm](asynchronous=draw.random() < 0.3),
        {"actor": model, "ref": model, "critic": model.as_critic("critic")},
        cluster,
        global_batch=draw.choice([4, 6, 8, 12]),
        max_prompt_tokens=32,
        max_response_tokens=128,
        micro_batch=draw.choice([1, 2]),
    )
    mean = draw.uniform(8, 100)
    lengths = Lengths(draw.uniform(4, 32), mean, mean * 1.5, mean * 2)
    return CostModel(job), lengths


@pytest.mark.parametrize("block", range(10))
def test_best_plan_equals_exhaustive_search(block):
    for seed in range(block * 10, block * 10 + 10):
        cost, lengths = instance(seed)
        divisors = seed % 4 == 0
        constraints = Constraints(degrees="divisors" if divisors else "powers_of_two")
        fewest, plan = exhaustive(cost, lengths, divisors)
        if plan is None:
            with pytest.raises(NoFeasiblePlan):
                best(cost, lengths, constraints)
            continue
        assert cost.step(plan, lengths).step.mean_s <= fewest * (1 + 1e-9), seed
        found = best(cost, lengths, constraints).best
        assert found.step.step.mean_s == pytest.approx(fewest, rel=1e-9), seed
        assert not plan_problems(found.plan, cost.job)
        assert cost.memory_problem(found.plan, lengths) is None


def test_instances_cover_infeasible_tight_and_roomy_memory():
    outcomes = {"none": 0, "tight": 0, "roomy": 0}
    for seed in range(40):
        cost, lengths = instance(seed)
        roomy = CostModel(cost.job, headroom=-1e6)
        free = best(roomy, lengths, Constraints()).best.step.step.mean_s
        try:
            found = best(cost, lengths, Constraints()).best.step.step.mean_s
        except NoFeasiblePlan:
            outcomes["none"] += 1
        else:
            outcomes["tight" if found > free * (1 + 1e-9) else "roomy"] += 1
    assert min(outcomes.values()) >= 3, outcomes


def random_plan(cost: CostModel, draw: random.Random) -> Plan:
    """Any plan that keeps the rules, wherever its devices are."""
    devices = list(cost.job.cluster.healthy)
    placements_of = {}
    for stage in cost.job.workload.stages:
        draw.shuffle(devices)
        some = sorted(devices[: draw.randint(1, len(devices))])
        ways = list(placements(cost.job, stage, some, divisors=False))
        placements_of[stage] = draw.choice(ways)
    return Plan(placements_of)


@pytest.mark.parametrize("block", range(4))
def test_what_runs_now_changes_which_devices_are_used_and_never_makes_the_plan_slower(block):
    for seed in range(block * 10, block * 10 + 10):
        cost, lengths = instance(seed)
        current = random_plan(cost, random.Random(seed))
        try:
            free = best(cost, lengths, Constraints()).best
        except NoFeasiblePlan:
            continue
        found = best(cost, lengths, Constraints(), current).best
        assert found.step.step.mean_s <= free.step.step.mean_s * (1 + 1e-9), seed
        assert not plan_problems(found.plan, cost.job)
        assert cost.memory_problem(found.plan, lengths) is None
        moved = [plan_bytes_to_move(cost.job, current, p) for p in (found.plan, free.plan)]
        assert moved[0] <= moved[1], seed
        assert best(cost, lengths, Constraints(), found.plan).best.plan == found.plan, seed
