"""What a white box misses, learned from neighbours: Gaussian processes with Student-t noise.

Several kernels, each a feature set with a length, an amplitude and a noise, are fitted; those that
predict the training rows best when left out (closed form) are averaged. Heavy-tailed noise keeps a
row that nothing explains from bending its neighbourhood. numpy only.

Source: Rasmussen and Williams (2006), "Gaussian Processes for Machine Learning", 2.2 and 5.4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from nereus_core.cost.op_classes import FloatArray

_LENGTHS = (0.25, 0.5, 1.0, 2.0)
"""In doublings of a feature."""
_AMPLITUDES = (0.05, 0.1)
_NOISES = (0.005, 0.02, 0.04)
_FREEDOM = 4.0
"""Of the Student-t noise; these grids are chosen, the training rows choose within them."""
_AVERAGED = 6
_SELECTING = 160
"""Rows on which kernels are compared: a subset keeps a fit of a thousand rows within seconds."""
_REWEIGHTINGS = 8

Features = Mapping[str, FloatArray]
"""Per feature set [num_rows, num_features]."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    features: str
    length: float
    amplitude: float
    noise: float

    def between(self, a: Features, b: Features) -> FloatArray:
        left, right = a[self.features] / self.length, b[self.features] / self.length
        squares = (left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T
        return np.asarray(self.amplitude**2 * np.exp(-np.maximum(0.0, squares) / 2))


@dataclass(frozen=True, slots=True, eq=False)
class _Process:
    kernel: _Kernel
    rows: Features
    weights: FloatArray
    inverse: FloatArray
    loo_error: float

    @classmethod
    def fitted(cls, kernel: _Kernel, rows: Features, targets: FloatArray) -> _Process:
        """Expectation-maximization over the noise of each row."""
        inner = kernel.between(rows, rows)
        trust = np.ones(len(targets))
        for _ in range(_REWEIGHTINGS):
            inverse = np.linalg.inv(inner + np.diag(kernel.noise**2 / trust + 1e-9))
            mean = inner @ (inverse @ targets)
            spread = np.diag(inner) - np.einsum("ij,ij->i", inner @ inverse, inner)
            seen = ((targets - mean) ** 2 + spread) / kernel.noise**2
            trust = (_FREEDOM + 1) / (_FREEDOM + seen)
        weights = inverse @ targets
        left_out = np.abs(weights / np.diag(inverse))
        return cls(kernel, rows, weights, inverse, float(left_out.mean()))

    def predict(self, rows: Features) -> tuple[FloatArray, FloatArray]:
        """Mean and variance per row, noise included."""
        cross = self.kernel.between(rows, self.rows)
        explained = np.einsum("ij,ij->i", cross @ self.inverse, cross)
        variance = self.kernel.amplitude**2 - explained + self.kernel.noise**2
        return cross @ self.weights, np.maximum(1e-10, variance)


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """An average of processes."""

    members: tuple[_Process, ...]

    @classmethod
    def fitted(cls, rows: Features, targets: FloatArray, seed: int = 0) -> Residual:
        """Fit to the logs of measured / predicted."""
        some = np.random.default_rng(seed).permutation(len(targets))[:_SELECTING]
        few = {name: values[some] for name, values in rows.items()}
        kernels = [_Kernel(*k) for k in product(rows, _LENGTHS, _AMPLITUDES, _NOISES)]
        compared = [_Process.fitted(k, few, targets[some]) for k in kernels]
        best = sorted(compared, key=lambda p: p.loo_error)[:_AVERAGED]
        if len(some) < len(targets):
            best = [_Process.fitted(p.kernel, rows, targets) for p in best[:2]]
        return cls(tuple(best))

    def predict(self, rows: Features) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation per row of the mixture of the members."""
        means, variances = zip(*(m.predict(rows) for m in self.members), strict=True)
        mean = np.mean(means, axis=0)
        return mean, np.sqrt(np.mean(variances, axis=0) + np.var(means, axis=0))
