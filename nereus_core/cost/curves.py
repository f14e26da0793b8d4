"""Curves: how one kind of device falls short of its peaks, by size; fitted offline.

A number per class cannot say that small products run slower, that launches hide behind kernels and
that gradients travel while a backward pass still computes. These depend on how fast things *really*
are, which would make seconds nonlinear in efficiency. Curves keep the linearity: what hides behind
what is reckoned at the nominal efficiencies kept here, and `EfficiencyTable` learns online how far
the job is from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nereus_core.cluster import DeviceSpec
from nereus_core.cost.op_classes import CLASSES, Column, FloatArray, OpClass

# Chosen, not measured: about what untuned code reaches, so that a class never seen is not
# flattered. A plan that wins only by such a class has to win by its lower bound.
CHOSEN: Mapping[OpClass, float] = {
    OpClass.GEMM: 0.4,
    OpClass.GEMM_DECODE: 0.4,
    OpClass.ATTENTION_PREFILL: 0.3,
    OpClass.ATTENTION_DECODE: 0.3,
    OpClass.MEMORY_BOUND: 0.5,
    OpClass.HEAD: 0.4,
    OpClass.ALL_REDUCE_INTRA: 0.5,
    OpClass.ALL_REDUCE_INTER: 0.4,
    OpClass.ALL_GATHER_INTRA: 0.5,
    OpClass.ALL_GATHER_INTER: 0.4,
    OpClass.P2P_INTRA: 0.5,
    OpClass.P2P_INTER: 0.4,
    OpClass.LAUNCH: 0.5,
    OpClass.COPY: 0.4,
    OpClass.HOST: 0.4,
    OpClass.FIXED: 0.5,
}


@dataclass(frozen=True, slots=True)
class Curves:
    """Shape parameters of a kind of device; the default is a device without any such effect."""

    nominal: Mapping[OpClass, float] = field(default_factory=lambda: CHOSEN)
    """Efficiency in (0, 1] per class, at which hiding is reckoned."""
    half_tokens: float = 0.0
    """Rows of a matrix product at which it reaches half its speed."""
    half_width: float = 0.0
    """Columns per rank (hidden / tp) at which it reaches half its speed."""
    hiding: float = 8.0
    """Exponent with which launches hide behind kernels: 1 not at all, infinite wholly."""
    overlap: float = 1.0
    """Exponent with which gradient sums hide behind the last backward pass: 1 not at all.
    Source of the form: Pollux (OSDI 2021), section 3.2."""
    gradient_rate: float = 1.0
    """Speed of gradient sums over units, of that of other all-reduces: they go in many buckets."""
    source: str = "chosen, not measured"

    @property
    def inverse(self) -> FloatArray:
        """1 / nominal efficiency per class."""
        return 1 / np.array([self.nominal[c] for c in CLASSES])

    def saturation(self, tokens: Column, width: Column) -> FloatArray:
        """Factor, at least 1, on the seconds of a matrix product of so many rows and columns."""
        return np.asarray((1 + self.half_tokens / tokens) * (1 + self.half_width / width))


def exposed(hidden_s: FloatArray, behind_s: FloatArray, exponent: float) -> FloatArray:
    """Seconds of the first that remain when it runs beside the second.

    ``(a^g + b^g)^(1/g) - b``: all of a for g = 1, ``max(0, a - b)`` for an infinite exponent.
    """
    largest = np.maximum(np.maximum(hidden_s, behind_s), 1e-30)
    a, b = hidden_s / largest, behind_s / largest
    return np.asarray(
        np.maximum(0.0, largest * ((a**exponent + b**exponent) ** (1 / exponent) - b))
    )


A100 = Curves(
    half_tokens=208.0,
    half_width=21.0,
    hiding=4.0,
    overlap=1.54,
    gradient_rate=0.59,
    source="fitted to vTrain's measured multi-node plans (MIT) with benchmarks/fits/vtrain.py",
)


def curves_of(spec: DeviceSpec) -> Curves:
    """Curves known for a kind of device: NVIDIA data-center parts take the A100's."""
    return A100 if spec.name.startswith(("a100", "h100", "h200")) else Curves()
