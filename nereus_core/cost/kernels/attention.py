"""Attention: over whole prompts (compute), and for one new token per sequence (cache reading)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus_core.cluster import DeviceSpec
from nereus_core.cost.kernels.inputs import require_rate, require_sizes
from nereus_core.cost.op_classes import Column, FloatArray


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds of causal attention of b sequences of so many tokens over themselves."""

    compute_fraction: float
    bandwidth_fraction: float
    launch_s: float
    rows_half: float
    """Rows of all heads and sequences together at which half the device is busy."""
    source: str

    def seconds(
        self,
        spec: DeviceSpec,
        sequences: Column,
        tokens: Column,
        query: Column,
        kv: Column,
        head_dim: float,
        each_bytes: float,
    ) -> FloatArray:
        """Predict one call.

        Args:
            spec: peaks of the device.
            sequences: how many.
            tokens: of each of them.
            query: elements of one token's queries on one rank (heads x head_dim).
            kv: elements of one token's keys on one rank.
            head_dim: elements of one head.
            each_bytes: bytes of an element.

        Raises:
            CostInputError: a negative size or a peak of zero.
        """
        for name, size in (("sequences", sequences), ("tokens", tokens)):
            require_sizes(name, size)
        flops_per_s = require_rate("matrix peak", spec.peak_flops_per_s) * self.compute_fraction
        bytes_per_s = require_rate("memory peak", spec.memory_bytes_per_s) * self.bandwidth_fraction
        rows = sequences * tokens
        # Scores and their use, 2 * 2 * heads * d * T^2 FLOPs, half of them above the diagonal.
        compute = 2 * rows * tokens * query / flops_per_s
        memory = 2 * rows * (query + kv) * each_bytes / bytes_per_s
        # A row of one head per thread block: (work) * (1 + half / rows) without dividing by rows.
        per_row = 2 * tokens * head_dim / flops_per_s
        per_row = per_row + 2 * head_dim * (1 + kv / query) * each_bytes / bytes_per_s
        return np.asarray(compute + memory + self.rows_half * per_row + self.launch_s)


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Seconds of attention of one new token per sequence over its cached keys and values."""

    bandwidth_fraction: float
    launch_s: float
    head_s: float
    """Per head and sequence, whatever the length of its cache."""
    token_s: float
    """Per cached token of one sequence: a chain that more sequences run beside, not behind."""
    source: str

    def seconds(
        self,
        spec: DeviceSpec,
        sequences: Column,
        context: Column,
        query: Column,
        kv: Column,
        head_dim: float,
        each_bytes: float,
    ) -> FloatArray:
        """Predict one call.

        Args:
            spec: peaks of the device.
            sequences: how many decode at once.
            context: mean cached tokens of each of them.
            query: elements of one token's queries on one rank.
            kv: elements of one token's keys on one rank.
            head_dim: elements of one head.
            each_bytes: bytes of an element.

        Raises:
            CostInputError: a negative size or a peak of zero.
        """
        for name, size in (("sequences", sequences), ("context", context)):
            require_sizes(name, size)
        bytes_per_s = require_rate("memory peak", spec.memory_bytes_per_s) * self.bandwidth_fraction
        read = 2 * sequences * each_bytes * (context * kv + query)
        busy = read / bytes_per_s + self.head_s * sequences * query / head_dim
        return np.hypot(busy, self.token_s * context) + self.launch_s
