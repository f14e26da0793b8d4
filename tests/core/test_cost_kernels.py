"""Kernel curves: monotone in every size, never beyond their peaks, and refusing nonsense."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel, OpClass
from nereus_core.cost.kernels import (
    Collective,
    copy_curve,
    kernels_of,
    layer_gemm_s,
    message_curve,
    prior_fractions,
)
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.device_specs import (
    A100_SXM_80,
    CPU_SEAT,
    H100_SXM,
    H200_SXM,
    INFINIBAND_HDR,
    INFINIBAND_NDR,
    LOOPBACK,
    NVLINK3,
    NVLINK4,
)
from nereus_core.errors import CostInputError
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import Job, grpo

SPECS = (A100_SXM_80, H100_SXM, H200_SXM, CPU_SEAT)
LINKS = (NVLINK3, NVLINK4, INFINIBAND_HDR, INFINIBAND_NDR, LOOPBACK)
spec = st.sampled_from(SPECS)
link = st.sampled_from(LINKS)
size = st.floats(1, 1e5)
grow = st.floats(1, 16)


@settings(max_examples=100, deadline=None)
@given(spec, st.tuples(size, size, size), st.integers(0, 2), grow)
def test_a_larger_product_never_takes_less(device, shape, which, factor):
    curve = kernels_of(device).gemm
    larger = tuple(s * factor if i == which else s for i, s in enumerate(shape))
    small_s, large_s = (float(curve.seconds(device, *s, 2.0)) for s in (shape, larger))
    assert large_s >= small_s * (1 - 1e-9)
    assert small_s >= 2 * np.prod(shape) / device.peak_flops_per_s


@settings(max_examples=100, deadline=None)
@given(spec, st.floats(1, 512), st.floats(1, 1e5), grow, st.booleans(), st.booleans())
def test_more_or_longer_sequences_never_take_less(device, sequences, tokens, factor, more, decode):
    kernels = kernels_of(device)
    curve = kernels.decode if decode else kernels.prefill
    grown = (sequences * factor, tokens) if more else (sequences, tokens * factor)
    small_s, large_s = (
        float(curve.seconds(device, *s, 4096.0, 1024.0, 128.0, 2.0))
        for s in ((sequences, tokens), grown)
    )
    assert large_s >= small_s * (1 - 1e-9) > 0


@settings(max_examples=100, deadline=None)
@given(link, st.sampled_from(Collective), st.integers(2, 64), st.floats(0, 1e9), grow)
def test_messages_grow_with_bytes_and_ranks_and_shrink_with_bandwidth(
    wire, what, ranks, size_bytes, factor
):
    curve = message_curve(what, wire)
    base_s = float(curve.seconds(wire, what, ranks, size_bytes))
    assert float(curve.seconds(wire, what, ranks, size_bytes * factor)) >= base_s * (1 - 1e-9)
    assert float(curve.seconds(wire, what, ranks + 1, size_bytes)) >= base_s * (1 - 1e-9)
    faster = replace(wire, bytes_per_s=wire.bytes_per_s * factor)
    assert float(curve.seconds(faster, what, ranks, size_bytes)) <= base_s * (1 + 1e-9)
    assert base_s >= what.wire(np.float64(ranks)) * size_bytes / wire.bytes_per_s * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(spec, st.floats(1, 1e5), st.floats(1, 8))
def test_more_bandwidth_and_a_higher_peak_never_take_longer(device, tokens, factor):
    one = np.ones(1, dtype=np.int64)
    shapes = RankShapes.of(LLAMA_3_1_8B, Options.within_node(one, one, one))
    curve = kernels_of(device).gemm
    base_s = layer_gemm_s(curve, device, LLAMA_3_1_8B, shapes, tokens, 2.0)
    for better in (
        replace(device, memory_bytes_per_s=device.memory_bytes_per_s * factor),
        replace(device, peak_flops_per_s=device.peak_flops_per_s * factor),
    ):
        assert layer_gemm_s(curve, better, LLAMA_3_1_8B, shapes, tokens, 2.0) <= base_s


def test_a_group_of_one_sends_nothing():
    for wire in LINKS:
        for what in set(Collective) - {Collective.P2P}:
            assert float(message_curve(what, wire).seconds(wire, what, 1, 1e6)) == 0.0


def test_measured_kinds_have_priors_and_others_none():
    measured = Cluster.homogeneous(2, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
    found = prior_fractions(measured)
    assert {OpClass.GEMM, OpClass.ATTENTION_DECODE, OpClass.ALL_REDUCE_INTRA} <= set(found)
    assert all(0 < value <= 1 for value in found.values())
    assert not prior_fractions(Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK))
    cost = CostModel(Job(grpo(), dict.fromkeys(("actor", "ref"), LLAMA_3_1_8B), measured, 64, 8, 8))
    assert cost.efficiencies.of(OpClass.GEMM) == pytest.approx(found[OpClass.GEMM])


def test_copies_to_the_host_take_longer_than_on_the_device():
    for device in SPECS:
        wire, curve = copy_curve(device)
        copied_s = float(curve.seconds(wire, Collective.P2P, 2, 1e9))
        assert copied_s > 1e9 / device.memory_bytes_per_s


def test_nonsense_is_refused_by_name():
    kernels = kernels_of(H100_SXM)
    with pytest.raises(CostInputError, match="memory peak is 0"):
        kernels.gemm.seconds(replace(H100_SXM, memory_bytes_per_s=0.0), 1, 1, 1, 2.0)
    with pytest.raises(CostInputError, match="matrix peak is nan"):
        kernels.gemm.seconds(replace(H100_SXM, peak_flops_per_s=float("nan")), 1, 1, 1, 2.0)
    with pytest.raises(CostInputError, match="gemm m is -1"):
        kernels.gemm.seconds(H100_SXM, -1.0, 1, 1, 2.0)
    with pytest.raises(CostInputError, match="context is -5"):
        kernels.decode.seconds(H100_SXM, 1, -5.0, 128.0, 128.0, 128.0, 2.0)
    with pytest.raises(CostInputError, match="link bandwidth is 0"):
        message_curve(Collective.P2P, NVLINK4).seconds(
            replace(NVLINK4, bytes_per_s=0.0), Collective.P2P, 2, 1.0
        )
    with pytest.raises(CostInputError, match="message bytes is nan"):
        message_curve(Collective.P2P, NVLINK4).seconds(NVLINK4, Collective.P2P, 2, float("nan"))
