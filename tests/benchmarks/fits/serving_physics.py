"""What the core's kernel curves say about one serving row, before anything is learned from rows.

A closed loop keeps ``batch`` requests in flight. As many as the cache holds decode together; every
output token of a request costs an iteration of decoding and its share of the prefills of requests
that take the place of finished ones; a first token waits for its own prefill, and for those of the
requests that came at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fits import kernel_tables as tables
from fits.curves import fit_attention, fit_gemm, fit_message
from fits.serving_rows import ServingRow
from nereus_core.cluster import DeviceSpec
from nereus_core.cost.kernels import (
    Collective,
    DecodeCurve,
    GemmCurve,
    MessageCurve,
    PrefillCurve,
    layer_gemm_s,
)
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.device_specs import H100_SXM, H200_SXM, NVLINK4

DEVICES: dict[str, DeviceSpec] = {"h100_sxm": H100_SXM, "h200_sxm": H200_SXM}
PRECISIONS = {"": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block"}
CACHE_PARTS = {"trtllm": 0.9, "vllm": 0.9, "sglang": 0.8}
"""Of device memory for weights and cache: defaults of gpu_memory_utilization (vLLM),
free_gpu_memory_fraction (TensorRT-LLM), mem_fraction_static less captured graphs (SGLang)."""
CACHE_BYTES = 2.0
"""Of an element; engines that run fp8 products keep fp8 caches too, as far as the rows tell."""
WAITED_PART = 0.25
"""Of the batch's prefills, that a request waits for: half when all come at once, none when they
come one by one; chosen between, the campaigns' residuals say which."""
CHUNK_TOKENS = 8192
"""Prompt tokens of one pass: vLLM's and TensorRT-LLM's default max_num_batched_tokens."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Curves fitted on the kernel tables of the training folder."""

    gemm: dict[str, GemmCurve]
    prefill: PrefillCurve
    decode: DecodeCurve
    all_reduce: MessageCurve

    @classmethod
    def fitted(cls, folder: Path) -> Kernels:
        """Fit H100 tables; H200 has the same processors.

        Raises:
            FileNotFoundError: a table is missing.
        """
        prefill = tables.attention(folder, "h100_sxm", "context")
        decode = tables.attention(folder, "h100_sxm", "generation")
        sums = tables.custom_all_reduce(folder, "h100_sxm")
        gemm = {}
        for precision, table in tables.gemms(folder, "h100_sxm"):
            each = tables.ELEMENT_BYTES[precision]
            gemm[precision] = fit_gemm(table, _peak(H100_SXM, each), each).curve
        if prefill is None or decode is None or sums is None or set(gemm) < {"bfloat16", "fp8"}:
            raise FileNotFoundError(
                f"no H100 kernel tables in {folder / 'aiconfigurator'}; set NEREUS_DATA"
            )
        return cls(
            gemm,
            fit_attention(PrefillCurve, prefill, H100_SXM).curve,
            fit_attention(DecodeCurve, decode, H100_SXM).curve,
            fit_message(sums, NVLINK4, Collective.ALL_REDUCE).curve,
        )


@dataclass(frozen=True, slots=True)
class Physics:
    """Seconds of one row's parts."""

    iteration_s: float
    """One token for each of those that decode together."""
    prefill_s: float
    """One prompt alone."""
    shared_prefill_s: float
    """One prompt's share of a full pass."""
    slots: float
    """Requests that the cache holds at once, at most the batch."""

    def tpot_s(self, row: ServingRow) -> float:
        """An iteration, and a share of the prefills that happen meanwhile."""
        return self.iteration_s + self.slots * self.shared_prefill_s / row.osl

    def ttft_s(self, row: ServingRow) -> float:
        """Own prefill, part of those of the others, and waiting for a place in the cache."""
        others = WAITED_PART * row.batch * self.shared_prefill_s
        waiting = (row.batch / self.slots - 1) * row.osl * self.tpot_s(row)
        return self.prefill_s + others + self.iteration_s + waiting

    @classmethod
    def of(cls, row: ServingRow, kernels: Kernels) -> Physics:
        """Price a row."""
        device, precision = DEVICES[row.system], PRECISIONS[row.quantization]
        if row.quantization and precision not in kernels.gemm:
            precision = "fp8"
        each, model = tables.ELEMENT_BYTES[precision], row.spec
        one = np.ones(1, dtype=np.int64)
        shapes = RankShapes.of(model, Options.within_node(one * row.tp, one * row.pp, one))
        layers, head_dim = model.num_layers, float(model.head_dim)
        weights = float(shapes.params[0]) * each
        cached = 1.0 if row.quantization else CACHE_BYTES
        per_token = 2 * float(shapes.kv[0]) * float(shapes.layers[0]) * cached
        room = CACHE_PARTS[row.backend] * device.memory_bytes - weights
        held = max(room, 0.02 * device.memory_bytes) / per_token
        slots = float(np.clip(held / (row.isl + row.osl / 2), 1.0, row.batch))
        products, wide = kernels.gemm[precision], kernels.gemm["bfloat16"]

        def layer_s(tokens: float) -> float:
            gemm = layer_gemm_s(products, _peak(device, each), model, shapes, tokens, each)
            size = tokens * model.hidden * CACHE_BYTES
            sums = kernels.all_reduce.seconds(NVLINK4, Collective.ALL_REDUCE, row.tp, size)
            return float(gemm[0]) + 2 * float(sums)

        def head_s(tokens: float) -> float:
            found = wide.seconds(device, tokens, shapes.vocab, float(model.hidden), 2.0)
            return float(found[0])

        def prefill_s(sequences: float) -> float:
            seen = kernels.prefill.seconds(
                device, sequences, row.isl, shapes.query, shapes.kv, head_dim, CACHE_BYTES
            )
            layer = layer_s(sequences * row.isl) + float(seen[0])
            return layers * layer + head_s(sequences)

        read = kernels.decode.seconds(
            device, slots, row.isl + row.osl / 2, shapes.query, shapes.kv, head_dim, CACHE_BYTES
        )
        iteration = layers * (layer_s(slots) + float(read[0])) + head_s(slots)
        together = max(1.0, min(slots, CHUNK_TOKENS / row.isl))
        return cls(iteration, prefill_s(1.0), prefill_s(together) / together, slots)


def _peak(device: DeviceSpec, each_bytes: float) -> DeviceSpec:
    """Specification with the matrix peak of a precision: half the bytes, twice the rate."""
    return replace(device, peak_flops_per_s=device.peak_flops_per_s * 2 / each_bytes)
