from dataclasses import replace

import numpy as np
import pytest

from nereus_core.cluster import Cluster
from nereus_core.cost.curves import CHOSEN, Curves, curves_of, exposed
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import INDEX, OpClass
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.cost.training import Passes, price
from nereus_core.device_specs import A100_SXM_80, CPU_SEAT, INFINIBAND_HDR, NVLINK3
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import ACTOR_TRAIN, BFLOAT16_MIXED, REF_INFER, Job, grpo

CLUSTER = Cluster.homogeneous(4, 8, A100_SXM_80, NVLINK3, INFINIBAND_HDR)
MODELS = {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B}
JOB = Job(grpo(), MODELS, CLUSTER, 64, 1024, 1024, BFLOAT16_MIXED)
LENGTHS = Lengths(1024, 1024, 1024, 1024)
PLAIN = Curves(hiding=1e6)


def options(tp=1, pp=1, dp=8, crosses=(False, False, False)):
    columns = [np.array([n]) for n in (tp, pp, dp)]
    return Options(*columns, *(np.array([c]) for c in crosses))


def passes(job=JOB, at=None, stage=ACTOR_TRAIN):
    at = at or options()
    return Passes.of(job, stage, at, RankShapes.of(LLAMA_3_1_8B, at), LENGTHS)


def seconds(op_class, job=JOB, at=None, curves=PLAIN, stage=ACTOR_TRAIN):
    return float(price(passes(job, at, stage), CLUSTER, curves)[0, INDEX[op_class]])


def test_recomputation_costs_one_more_forward_pass_through_the_layers_and_not_the_head():
    full = replace(JOB, recompute="full")
    assert seconds(OpClass.GEMM, full) == pytest.approx(4 / 3 * seconds(OpClass.GEMM))
    assert seconds(OpClass.HEAD, full) == pytest.approx(seconds(OpClass.HEAD))
    infer = seconds(OpClass.GEMM, stage=REF_INFER)
    assert seconds(OpClass.GEMM) == pytest.approx(3 * infer)
    assert seconds(OpClass.GEMM, full, stage=REF_INFER) == pytest.approx(infer)


def test_a_pipeline_takes_m_plus_pp_minus_1_rounds_and_only_its_last_rank_has_a_head():
    one, piped = passes(at=options(dp=2)), passes(at=options(pp=4, dp=2))
    assert (one.rounds, piped.rounds) == (32, 35)
    assert seconds(OpClass.HEAD, at=options(pp=4, dp=2)) == seconds(OpClass.HEAD, at=options(dp=2))


def test_small_products_are_slower_and_large_ones_are_not():
    slow = replace(PLAIN, half_tokens=300.0)
    assert slow.saturation(300.0, 1.0) == pytest.approx(2.0)
    assert slow.saturation(3e6, 1.0) == pytest.approx(1.0, rel=1e-3)
    assert seconds(OpClass.GEMM, curves=slow) > seconds(OpClass.GEMM)


@pytest.mark.parametrize("exponent", [1.0, 2.0, 1e3])
def test_what_hides_never_costs_more_than_alone_nor_less_than_what_sticks_out(exponent):
    a, b = np.array([0.0, 1.0, 5.0, 3.0]), np.array([2.0, 2.0, 2.0, 0.0])
    left = exposed(a, b, exponent)
    assert (left <= a + 1e-12).all()
    assert (left >= np.maximum(0.0, a - b) - 1e-2).all()
    if exponent == 1.0:
        assert left == pytest.approx(a)


def test_gradient_sums_hide_behind_the_last_backward_pass():
    crossing = options(dp=8, crosses=(False, False, True))
    alone = seconds(OpClass.ALL_REDUCE_INTER, at=crossing)
    hidden = seconds(OpClass.ALL_REDUCE_INTER, at=crossing, curves=replace(PLAIN, overlap=3.0))
    assert 0 < hidden < alone


def test_a_sharded_optimizer_scatters_and_gathers_instead_of_reducing_everywhere():
    sharded = replace(JOB, sharded_optimizer=True)
    assert seconds(OpClass.ALL_REDUCE_INTRA, sharded) == 0.0
    assert seconds(OpClass.ALL_GATHER_INTRA, sharded) > 0.0
    assert seconds(OpClass.MEMORY_BOUND, sharded) < seconds(OpClass.MEMORY_BOUND)


def test_launches_count_only_as_far_as_kernels_do_not_hide_them():
    tiny = Passes.joined([passes(), passes()])
    assert len(tiny.tokens) == 2
    slow = replace(CLUSTER, device_spec=replace(A100_SXM_80, launch_s=1.0))
    assert price(tiny, slow, PLAIN)[0, INDEX[OpClass.LAUNCH]] > 0
    assert seconds(OpClass.LAUNCH) == pytest.approx(0.0, abs=1e-3)


def test_a_ring_with_more_members_in_a_node_uses_more_links_out_of_it():
    crossing = options(dp=32, crosses=(False, False, True))
    railed = replace(crossing, dp_rails=np.array([8]))
    inter = OpClass.ALL_REDUCE_INTER
    assert seconds(inter, at=railed) < 0.5 * seconds(inter, at=crossing)


def test_a_device_nobody_measured_has_no_curves():
    assert curves_of(CPU_SEAT) == Curves()
    assert curves_of(A100_SXM_80).half_tokens > 0
    assert set(CHOSEN) == set(OpClass)
