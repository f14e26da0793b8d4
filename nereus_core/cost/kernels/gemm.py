"""Matrix products: a compute and a memory regime that meet smoothly, over m, n and k.

Compute seconds of ``2 m n k`` FLOPs are stretched where a dimension is short: a product works in
tiles, the last tile of each dimension is part empty, and a short k leaves the pipeline of a tile
unfilled. Stretching by ``1 + half / dimension`` is the same as adding ``half`` to the dimension, so
that ``half`` reads as the length at which half the peak is reached, and the curve stays monotone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nereus_core.cluster import DeviceSpec
from nereus_core.cost.kernels.inputs import require_rate, require_sizes
from nereus_core.cost.op_classes import Column, FloatArray
from nereus_core.cost.shapes import RankShapes
from nereus_core.model import ModelSpec


def smooth_max(a: ArrayLike, b: ArrayLike) -> FloatArray:
    """Fourth-order mean of two regimes: their maximum, 19% more where they are equal."""
    square = np.square(np.square(a)) + np.square(np.square(b))
    return np.asarray(np.sqrt(np.sqrt(square)))


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Seconds of ``[m, k] @ [k, n]``."""

    compute_fraction: float
    """Of the matrix peak, that large products reach."""
    bandwidth_fraction: float
    """Of the memory peak, that products with few rows reach."""
    launch_s: float
    """Seconds that the smallest product takes."""
    m_half: float
    n_half: float
    k_half: float
    source: str

    def seconds(
        self, spec: DeviceSpec, m: Column, n: Column, k: Column, each_bytes: float
    ) -> FloatArray:
        """Predict one product.

        Args:
            spec: peaks of the device.
            m: rows of the activations (tokens).
            n: columns of the result on one device.
            k: length of the sums on one device.
            each_bytes: bytes of an element.

        Raises:
            CostInputError: a negative dimension or a peak of zero.
        """
        for name, size in (("gemm m", m), ("gemm n", n), ("gemm k", k)):
            require_sizes(name, size)
        flops_per_s = require_rate("matrix peak", spec.peak_flops_per_s) * self.compute_fraction
        bytes_per_s = require_rate("memory peak", spec.memory_bytes_per_s) * self.bandwidth_fraction
        padded = (m + self.m_half) * (n + self.n_half) * (k + self.k_half)
        touched = each_bytes * (m * (k + n) + k * n)
        return smooth_max(2 * padded / flops_per_s, touched / bytes_per_s) + self.launch_s


def layer_gemm_s(
    curve: GemmCurve,
    spec: DeviceSpec,
    model: ModelSpec,
    shapes: RankShapes,
    tokens: Column,
    each_bytes: float,
) -> FloatArray:
    """Seconds of one decoder layer's products on one rank: qkv, output, gate and up, down.

    Args:
        curve: of the device.
        spec: peaks of the device.
        model: for the hidden size.
        shapes: what tensor parallelism leaves of it, one row per option.
        tokens: rows, one per option, or [..., options] for many at once.
        each_bytes: bytes of an element.
    """
    h = float(model.hidden)
    sizes: tuple[tuple[Column, Column], ...] = (
        (shapes.query + 2 * shapes.kv, h),
        (h, shapes.query),
        (2 * shapes.intermediate, h),
        (h, shapes.intermediate),
    )
    total: FloatArray = np.zeros(())
    for n, k in sizes:
        total = total + curve.seconds(spec, tokens, n, k, each_bytes)
    return total
