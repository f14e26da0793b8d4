"""Fit the core's curves and nominal efficiencies to measured steps, in log space and robustly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nereus_core.cost.curves import CHOSEN, Curves
from nereus_core.cost.op_classes import FloatArray, OpClass
from nereus_core.cost.training import Passes, price

from .vtrain_rows import CLUSTER

_CLASSES = (
    OpClass.GEMM,
    OpClass.HEAD,
    OpClass.ATTENTION_PREFILL,
    OpClass.MEMORY_BOUND,
    OpClass.ALL_REDUCE_INTRA,
    OpClass.ALL_REDUCE_INTER,
    OpClass.P2P_INTRA,
    OpClass.P2P_INTER,
    OpClass.LAUNCH,
)
# Classes by what their inverse efficiency exceeds 1 by, which keeps efficiencies in (0, 1).
# Where a fit starts and how far, in logs, it may wander from there; chosen, not measured.
_START = {c.value: (1 / CHOSEN[c] - 1, 1.0) for c in _CLASSES} | {
    "launch": (4.0, 1.0),
    "half_tokens": (300.0, 1.0),
    "half_width": (100.0, 1.0),
    "hiding": (3.0, 0.5),  # less 1
    "overlap": (1.0, 0.5),  # less 1
    "gradient_rate": (0.5, 1.0),
    "latency": (3.0, 1.0),  # of a message inside a node, over the link's own
    "fixed_s": (0.02, 1.0),
}
_ORIGIN = np.log([start for start, _ in _START.values()])
_WIDTH = np.array([width for _, width in _START.values()])
_HUBER = 0.05
"""Relative error beyond which a row pulls no harder."""


def named(unknowns: FloatArray) -> dict[str, float]:
    """Unknowns by name, out of the logarithm."""
    return dict(zip(_START, np.exp(unknowns), strict=True))


def curves_at(unknowns: FloatArray) -> Curves:
    """Curves of a vector of logarithms."""
    value = named(unknowns)
    nominal = dict(CHOSEN) | {c: 1 / (1 + value[c.value]) for c in _CLASSES}
    return Curves(
        nominal,
        value["half_tokens"],
        value["half_width"],
        1 + value["hiding"],
        1 + value["overlap"],
        value["gradient_rate"],
        "fitted",
    )


def seconds(unknowns: FloatArray, passes: Passes) -> FloatArray:
    """Predicted seconds per row."""
    curves, value = curves_at(unknowns), named(unknowns)
    intra = replace(CLUSTER.intra_node, latency_s=CLUSTER.intra_node.latency_s * value["latency"])
    work = price(passes, replace(CLUSTER, intra_node=intra), curves)
    return np.asarray(work @ curves.inverse + value["fixed_s"])


def fitted(passes: Passes, measured_s: FloatArray, near: FloatArray | None = None) -> FloatArray:
    """Unknowns whose predictions are nearest, in robust squares of logs and toward the start.

    Args:
        passes: of the rows.
        measured_s: of the rows.
        near: where to begin, when a fit of nearly the same rows is known; the end is the same
            minimum, found at a third of the cost.
    """
    target = np.log(measured_s)

    def misses(unknowns: FloatArray) -> FloatArray:
        z = (np.log(seconds(unknowns, passes)) - target) / _HUBER
        robust = np.sign(z) * np.sqrt(2 * (np.sqrt(1 + z * z) - 1))
        return np.concatenate([robust, (unknowns - _ORIGIN) / _WIDTH])

    # Several starts: one alone ends in a poor minimum now and then.
    random = np.random.default_rng(0)
    starts = [_ORIGIN + spread * random.normal(0, 0.5, len(_ORIGIN)) for spread in (0, 1, 1)]
    starts = starts if near is None else [near]
    ends = [least_squares(misses, start) for start in starts]
    return min(ends, key=lambda end: float(np.square(misses(end)).sum()))


def least_squares(
    misses: Callable[[FloatArray], FloatArray], start: FloatArray, iterations: int = 60
) -> FloatArray:
    """Levenberg-Marquardt with a forward-difference Jacobian.

    Source: Marquardt (1963), "An Algorithm for Least-Squares Estimation of Nonlinear Parameters".
    """
    at, damping, step = start, 1e-2, 1e-5
    residual = misses(at)
    for _ in range(iterations):
        jacobian = np.stack(
            [(misses(at + step * e) - residual) / step for e in np.eye(len(at))], axis=1
        )
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ residual
        before = float(residual @ residual)
        for _ in range(8):
            moved = at - np.linalg.solve(
                normal + damping * np.diag(np.diag(normal) + 1e-9), gradient
            )
            after = misses(moved)
            if float(after @ after) < before:
                break
            damping *= 4
        else:
            return at
        at, residual, damping = moved, after, damping / 4
        if before - float(residual @ residual) < 1e-8 * before:
            return at
    return at
