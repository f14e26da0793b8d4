from dataclasses import replace

import numpy as np
import pytest

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.shapes import Options
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    BFLOAT16_MIXED,
    REF_INFER,
    Job,
    TokenBudget,
    grpo,
)

CLUSTER = Cluster.homogeneous(1, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
JOB = Job(
    grpo(), {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B}, CLUSTER, 64, 1024, 4096, BFLOAT16_MIXED
)
LENGTHS = Lengths(512, 1024, 2048, 4096)
DEVICES = CLUSTER.devices
PARAMS = LLAMA_3_1_8B.num_params


def plan_of(**devices: tuple[Layout, tuple]) -> Plan:
    stages = {"generate": ACTOR_GENERATE, "infer": REF_INFER, "train": ACTOR_TRAIN}
    return Plan({stages[k]: Placement.packed(*v) for k, v in devices.items()})


APART = plan_of(
    generate=(Layout(1, 1), DEVICES[:2]), infer=(Layout(1, 1), DEVICES[2:4]),
    train=(Layout(4, 1), DEVICES[4:]),
)  # fmt: skip


def test_training_state_follows_the_precision():
    need = CostModel(JOB).memory(APART, LENGTHS)[DEVICES[4]]
    # Sharded by tp 4: bf16 parameters, two float32 moments, float32 master copy and gradients.
    state = PARAMS * (2 + 2 * 4 + 4 + 4) / 4
    assert state < need < 1.5 * state


def test_a_generating_unit_keeps_parameters_and_its_cache():
    need = CostModel(JOB).memory(APART, LENGTHS)[DEVICES[0]]
    per_token = 2 * 32 * 8 * 128 * 2  # keys and values, 32 layers, 8 kv heads of 128, bf16
    cache = 32 * (LENGTHS.prompt_mean + LENGTHS.response_p95) * per_token
    assert need == pytest.approx(2 * PARAMS + cache, rel=0.02)


def test_what_stays_adds_up_on_a_shared_device_and_what_runs_does_not():
    everywhere = (Layout(4, 1), DEVICES[:4])
    cost = CostModel(JOB)
    together = cost.memory(
        plan_of(generate=everywhere, infer=everywhere, train=everywhere), LENGTHS
    )
    alone = {
        k: cost.memory(plan_of(**{k: everywhere}), LENGTHS)[DEVICES[0]]
        for k in ("generate", "infer", "train")
    }
    stays = 2 * PARAMS / 4
    assert together[DEVICES[0]] < sum(alone.values())
    assert together[DEVICES[0]] == pytest.approx(alone["train"] + 2 * stays, rel=0.02)


def test_the_worst_device_is_named_with_need_and_have():
    small = replace(H100_SXM, memory_bytes=20 * 2**30)
    job = JOB.on(replace(CLUSTER, device_spec=small))
    problem = CostModel(job).memory_problem(APART, LENGTHS)
    assert problem is not None
    assert problem.startswith("node0:4 needs ")
    assert "actor/train=tp4pp1dp1 and has 18.00 GiB with 10% headroom" in problem
    assert CostModel(JOB).memory_problem(APART, LENGTHS) is None


def test_headroom_is_what_no_plan_may_use():
    assert CostModel(JOB, headroom=0.25).capacity_bytes == 0.75 * H100_SXM.memory_bytes


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(1, 4), Layout(4, 1)])
def test_longer_responses_need_more(layout):
    plan = plan_of(
        generate=(layout, DEVICES[:4]), infer=(layout, DEVICES[:4]), train=(layout, DEVICES[4:])
    )
    cost = CostModel(JOB)
    longer = replace(LENGTHS, response_p95=4096.0, response_max=8192.0)
    before, after = cost.memory(plan, LENGTHS), cost.memory(plan, longer)
    assert all(after[d] > before[d] for d in DEVICES)


def test_ranks_with_sequences_of_their_own_share_state_and_no_activations():
    def need(tp, **more):
        job = replace(JOB, micro_batch=2, **more)
        plan = plan_of(train=(Layout(tp, 1), DEVICES[:tp]))
        return CostModel(job).memory(plan, LENGTHS)[DEVICES[0]]

    state = PARAMS * (2 + 2 * 4 + 4 + 4)
    for tp in (2, 4, 8):
        # 64 sequences, two of them at a time on every rank: the same activations on each.
        alone = need(1, device_batch=64) - state
        assert need(tp, device_batch=64) - state / tp == pytest.approx(alone, rel=0.02)
        assert need(tp, device_batch=64) > need(tp)


def test_ranks_that_share_sequences_hold_a_part_of_each():
    state = PARAMS * (2 + 2 * 4 + 4 + 4)

    def activations(tp, **more):
        job = replace(JOB, micro_batch=2, **more)
        plan = plan_of(train=(Layout(tp, 1), DEVICES[:tp]))
        return CostModel(job).memory(plan, LENGTHS)[DEVICES[0]] - state / tp

    alone = activations(1, device_batch=64)
    # Ulysses of a fixed degree, beside FSDP groups of any size: two sequences at a time on a pair.
    pairs = {"device_batch": 128, "sequence_ranks": {ACTOR_TRAIN: 2}}
    for tp in (2, 4, 8):
        assert activations(tp, **pairs) == pytest.approx(alone / 2, rel=0.02)
    # Ulysses over each unit: two sequences at a time on all its ranks.
    units = {"unit_batch": 64, "sequence_parallel": True}
    for tp in (2, 4, 8):
        assert activations(tp, **units) == pytest.approx(alone / tp, rel=0.02)


def test_micro_batches_that_are_cut_by_tokens_are_full_whatever_lengths_are():
    state = PARAMS * (2 + 2 * 4 + 4 + 4)
    short = Lengths(100, 100, 200, 300)  # of 5,120 that there may be

    def activations(tp, lengths=short, tokens=20_480, **more):
        budget = {ACTOR_TRAIN: TokenBudget(tokens // 2, tokens)}
        job = replace(JOB, global_batch=4096, micro_tokens=budget, **more)
        plan = plan_of(train=(Layout(tp, 1), DEVICES[:tp]))
        return CostModel(job).memory(plan, lengths)[DEVICES[0]] - state / tp

    # As many sequences of 200 tokens as fill them: what 20,480 tokens take, one of four of 5,120.
    fixed = replace(JOB, global_batch=4096, micro_batch=4, device_batch=4096)
    long = Lengths(1024, 4096, 4096, 4096)
    plan = plan_of(train=(Layout(1, 1), DEVICES[:1]))
    full = CostModel(fixed).memory(plan, long)[DEVICES[0]] - state
    for tp in (1, 2, 4, 8):
        assert activations(tp, device_batch=4096) == pytest.approx(full, rel=0.02)
        followed = activations(tp, unit_batch=4096, sequence_parallel=True)
        assert followed == pytest.approx(full, rel=0.02)  # each rank's own share is full
    pairs = {"device_batch": 8192, "sequence_ranks": {ACTOR_TRAIN: 2}}
    assert activations(4, **pairs) == pytest.approx(full, rel=0.02)
    # A sequence that is longer than its rank's share is whole on all that share it.
    one = activations(4, long, tokens=2048, unit_batch=4096, sequence_parallel=True)
    assert one == pytest.approx(full * 2048 / 20_480, rel=0.03)
    # Fewer tokens than fit are what is held.
    few = replace(JOB, global_batch=8, device_batch=8)
    few = replace(few, micro_tokens={ACTOR_TRAIN: TokenBudget(20_480, 20_480)})
    held = CostModel(few).memory(plan, short)[DEVICES[0]] - state
    assert held == pytest.approx(full * 8 * 200 / 20_480, rel=0.03)


def test_ranks_that_cut_by_rows_hold_an_even_part_of_everything():
    big = Cluster.homogeneous(8, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
    for tp in (16, 64):  # of 8 key/value heads
        options = Options.within_node(np.array([tp]), np.array([1]), np.array([1]))
        job = replace(JOB, cluster=big, row_cut=frozenset({ACTOR_TRAIN}))
        found = CostModel(job).table(ACTOR_TRAIN, options, LENGTHS).persistent_bytes[0]
        assert found == pytest.approx(PARAMS * (2 + 2 * 4 + 4) / tp, rel=0.01)
