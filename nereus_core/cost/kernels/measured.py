"""Parameters of kernel curves, fitted to kernels measured by others; see shared data's README.

Written by ``python tests/benchmarks/kernel_times.py --priors`` from all rows of each table; errors
on rows that were not fitted: the same without ``--priors``.
"""

from __future__ import annotations

from collections.abc import Mapping

from nereus_core.cluster import LinkSpec
from nereus_core.cost.kernels.attention import DecodeCurve, PrefillCurve
from nereus_core.cost.kernels.gemm import GemmCurve
from nereus_core.cost.kernels.messages import Collective, MessageCurve

_AICONFIGURATOR = "ai-dynamo/aiconfigurator 095f58a"
_VIDUR = "microsoft/vidur 7d47513"

SAME_KERNELS = {"h200-sxm": "h100-sxm", "ib-ndr": "ib-hdr"}
"""Kinds nobody measured here, and the measured kind with the same processors or protocol."""

COPIES = {
    "a100-sxm-80gb": LinkSpec("pcie4", 32e9, 1e-5, f"{_AICONFIGURATOR}: a100_sxm.yaml pcie_bw"),
    "h100-sxm": LinkSpec("pcie5", 64e9, 1e-5, f"{_AICONFIGURATOR}: h100_sxm.yaml pcie_bw"),
}
"""Links between devices and their hosts; bandwidth per direction."""

GEMMS: Mapping[str, GemmCurve] = {
    "a100-sxm-80gb": GemmCurve(
        compute_fraction=0.8998,
        bandwidth_fraction=0.7438,
        launch_s=4.53e-06,
        m_half=90.01,
        n_half=127.9,
        k_half=112.2,
        source=f"{_AICONFIGURATOR}: a100_sxm__gemm__vllm__0.14.0__gemm_perf.parquet",
    ),
    "h100-sxm": GemmCurve(
        compute_fraction=0.8326,
        bandwidth_fraction=0.8397,
        launch_s=3.013e-06,
        m_half=9.326,
        n_half=13.21,
        k_half=145.9,
        source=f"{_AICONFIGURATOR}: h100_sxm__gemm__vllm__0.24.0__gemm_perf.parquet",
    ),
}
PREFILL: Mapping[str, PrefillCurve] = {
    "a100-sxm-80gb": PrefillCurve(
        compute_fraction=0.5953,
        bandwidth_fraction=0.379,
        launch_s=7.942e-06,
        rows_half=4919.0,
        source=f"{_AICONFIGURATOR}: "
        "a100_sxm__attention__vllm__0.14.0__context_attention_perf.parquet",
    ),
    "h100-sxm": PrefillCurve(
        compute_fraction=0.7014,
        bandwidth_fraction=0.4029,
        launch_s=9.556e-06,
        rows_half=6439.0,
        source=f"{_AICONFIGURATOR}: "
        "h100_sxm__attention__vllm__0.24.0__context_attention_perf.parquet",
    ),
}
DECODE: Mapping[str, DecodeCurve] = {
    "a100-sxm-80gb": DecodeCurve(
        bandwidth_fraction=0.7283,
        launch_s=1.695e-05,
        head_s=2.761e-09,
        token_s=1.473e-09,
        source=f"{_AICONFIGURATOR}: "
        "a100_sxm__attention__vllm__0.14.0__generation_attention_perf.parquet",
    ),
    "h100-sxm": DecodeCurve(
        bandwidth_fraction=0.8981,
        launch_s=1.184e-05,
        head_s=2.051e-09,
        token_s=2.772e-10,
        source=f"{_AICONFIGURATOR}: "
        "h100_sxm__attention__vllm__0.24.0__generation_attention_perf.parquet",
    ),
}
MESSAGES: Mapping[tuple[Collective, str], MessageCurve] = {
    (Collective.ALL_GATHER, "nvlink3"): MessageCurve(
        start_s=9.273e-06,
        hop_s=9.162e-07,
        bandwidth_fraction=0.8529,
        chunk_s=0.0001323,
        overlap=2.0,
        source=f"{_AICONFIGURATOR}: a100_sxm__comm__nccl__2.27.3__nccl_perf.parquet",
    ),
    (Collective.ALL_REDUCE, "nvlink3"): MessageCurve(
        start_s=8.917e-06,
        hop_s=9.795e-07,
        bandwidth_fraction=0.8792,
        chunk_s=0.000101,
        overlap=2.0,
        source=f"{_AICONFIGURATOR}: a100_sxm__comm__nccl__2.27.3__nccl_perf.parquet",
    ),
    (Collective.ALL_TO_ALL, "nvlink3"): MessageCurve(
        start_s=1.176e-05,
        hop_s=3.18e-07,
        bandwidth_fraction=0.8699,
        chunk_s=0.0001129,
        overlap=2.0,
        source=f"{_AICONFIGURATOR}: a100_sxm__comm__nccl__2.27.3__nccl_perf.parquet",
    ),
    (Collective.REDUCE_SCATTER, "nvlink3"): MessageCurve(
        start_s=9.105e-06,
        hop_s=8.702e-07,
        bandwidth_fraction=0.8978,
        chunk_s=0.0001077,
        overlap=2.0,
        source=f"{_AICONFIGURATOR}: a100_sxm__comm__nccl__2.27.3__nccl_perf.parquet",
    ),
    (Collective.ALL_GATHER, "nvlink4"): MessageCurve(
        start_s=4.716e-06,
        hop_s=9.294e-07,
        bandwidth_fraction=0.9153,
        chunk_s=6.256e-05,
        overlap=2.0,
        source=f"{_AICONFIGURATOR}: h100_sxm__comm__nccl__2.29.2__nccl_perf.parquet",
    ),
    (Collective.ALL_REDUCE, "nvlink4"): MessageCurve(
        start_s=4.748e-06,
        hop_s=8.614e-07,
        bandwidth_fraction=1.0,
        chunk_s=5.218e-05,
        overlap=2.0,
        source=f"{_AICONFIGURATOR}: h100_sxm__comm__nccl__2.29.2__nccl_perf.parquet",
    ),
    (Collective.ALL_TO_ALL, "nvlink4"): MessageCurve(
        start_s=7.772e-06,
        hop_s=1.856e-07,
        bandwidth_fraction=0.854,
        chunk_s=4.48e-05,
        overlap=2.0,
        source=f"{_AICONFIGURATOR}: h100_sxm__comm__nccl__2.29.2__nccl_perf.parquet",
    ),
    (Collective.REDUCE_SCATTER, "nvlink4"): MessageCurve(
        start_s=4.989e-06,
        hop_s=8.066e-07,
        bandwidth_fraction=0.8517,
        chunk_s=4.328e-05,
        overlap=2.0,
        source=f"{_AICONFIGURATOR}: h100_sxm__comm__nccl__2.29.2__nccl_perf.parquet",
    ),
    (Collective.ALL_REDUCE, "ib-hdr"): MessageCurve(
        start_s=0.0,
        hop_s=1.023e-05,
        bandwidth_fraction=1.0,
        chunk_s=0.0005143,
        overlap=2.0,
        source=f"{_VIDUR}: network__a100_dgx__all_reduce.csv.gz",
    ),
    (Collective.P2P, "nvlink3"): MessageCurve(
        start_s=1.61e-05,
        hop_s=1.158e-06,
        bandwidth_fraction=0.799,
        chunk_s=0.0,
        overlap=2.0,
        source=f"{_VIDUR}: network__a100_dgx__send_recv.csv.gz",
    ),
    (Collective.P2P, "ib-hdr"): MessageCurve(
        start_s=3.929e-05,
        hop_s=1.504e-06,
        bandwidth_fraction=0.3228,
        chunk_s=1.899e-05,
        overlap=2.0,
        source=f"{_VIDUR}: network__a100_dgx__send_recv.csv.gz",
    ),
}
