"""A Gaussian process over rows of several campaigns: what all share, and what each adds.

Covariance of two rows: a smooth part over the features, the same smooth shape again for rows of
one campaign, a constant per campaign, and noise with heavy tails (Student t, by reweighting), so
that a row nothing explains does not bend its neighbors. Scales are those of the greatest marginal
likelihood (Rasmussen and Williams 2006, 5.4.1). Intervals are conformal: quantiles of the
leave-one-out residuals over their own standard deviation (ibid. 5.4.2; Vovk et al. 2005).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

FloatArray = np.ndarray
_FREEDOM = 4.0
"""Degrees of freedom of the noise; chosen."""
_REWEIGHTINGS = 4
_BOUNDS = np.log([[0.2, 8.0], [0.02, 2.0], [0.02, 2.0], [0.02, 2.0], [0.01, 0.5]])
"""Of a length (in standard deviations of a feature), the three amplitudes, and the noise."""
_STARTS = np.log([2.0, 0.2, 0.15, 0.15, 0.06])
_STEPS = 40


@dataclass(frozen=True, slots=True)
class Prediction:
    """Log predictions and the 90% factor, in logs."""

    mean: FloatArray
    half: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class GroupProcess:
    """Fitted to rows; all values are logarithms."""

    features: FloatArray
    groups: FloatArray
    center: FloatArray
    spread: FloatArray
    scales: FloatArray
    mean: float
    factor: FloatArray
    weights: FloatArray
    trust: FloatArray
    stretch: float
    """Standard deviations that hold 90% of the left-out rows."""

    @classmethod
    def fitted(
        cls, features: FloatArray, groups: FloatArray, targets: FloatArray, confidence: float = 0.9
    ) -> GroupProcess:
        """Fit scales, weigh rows, and measure the spread of left-out rows.

        Args:
            features: [rows, features].
            groups: [rows], the campaign of each row.
            targets: [rows], logarithms of measured over priced seconds.
            confidence: of the intervals.
        """
        center, spread = features.mean(0), np.maximum(features.std(0), 1e-6)
        x = (features - center) / spread
        mean = float(np.median(targets))
        y, trust, count = targets - mean, np.ones(len(targets)), x.shape[1]
        start = np.concatenate([np.full(count, _STARTS[0]), _STARTS[1:]])
        bounds = [tuple(_BOUNDS[0])] * count + [tuple(b) for b in _BOUNDS[1:]]
        scales = start
        for turn in range(_REWEIGHTINGS):
            if turn in (0, 2):
                found = minimize(
                    lambda s, t=trust: _loss(s, x, groups, y, t),
                    scales,
                    method="L-BFGS-B",
                    jac=True,
                    bounds=bounds,
                    options={"maxiter": _STEPS},
                )
                scales = found.x
            inverse, weights = _solved(scales, x, groups, y, trust)
            left_out = weights / np.diag(inverse)
            noise = np.exp(2 * scales[-1])
            fit = y - noise / trust * weights
            trust = (_FREEDOM + 1) / (_FREEDOM + np.square(y - fit) / noise)
        inverse, weights = _solved(scales, x, groups, y, trust)
        left_out = weights / np.diag(inverse)
        # A new row has typical noise, not the noise it was found to have.
        own = 1 / np.diag(inverse) - np.exp(2 * scales[-1]) * (1 / trust - 1)
        deviations = np.sqrt(np.maximum(own, np.exp(2 * scales[-1])))
        rank = min(1.0, confidence * (1 + 1 / len(y)))
        stretch = float(np.quantile(np.abs(left_out) / deviations, rank))
        covariance = _covariance(scales, x, groups, x, groups)
        covariance[np.diag_indices(len(y))] += np.exp(2 * scales[-1]) / trust
        factor = cholesky(covariance, lower=True)
        return cls(features, groups, center, spread, scales, mean, factor, weights, trust, stretch)

    def predict(self, features: FloatArray, groups: FloatArray) -> Prediction:
        """Predict new rows; an unseen campaign gets what all share."""
        x = (self.features - self.center) / self.spread
        new = (features - self.center) / self.spread
        between = _covariance(self.scales, new, groups, x, self.groups)
        solved = solve_triangular(self.factor, between.T, lower=True)
        own = np.exp(2 * self.scales[-4:]).sum()
        deviation = np.sqrt(np.maximum(own - np.square(solved).sum(0), np.exp(2 * self.scales[-1])))
        return Prediction(self.mean + between @ self.weights, self.stretch * deviation)


def _covariance(
    scales: FloatArray, a: FloatArray, a_groups: FloatArray, b: FloatArray, b_groups: FloatArray
) -> FloatArray:
    lengths, amplitudes = np.exp(scales[:-4]), np.exp(2 * scales[-4:-1])
    left, right = a / lengths, b / lengths
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T
    smooth = np.exp(-np.maximum(squares, 0.0) / 2)
    same = a_groups[:, None] == b_groups[None]
    return amplitudes[0] * smooth + same * (amplitudes[1] * smooth + amplitudes[2])


def _loss(
    scales: FloatArray, x: FloatArray, groups: FloatArray, y: FloatArray, trust: FloatArray
) -> tuple[float, FloatArray]:
    """Negative log likelihood and its gradient."""
    lengths, amplitudes = np.exp(scales[:-4]), np.exp(2 * scales[-4:-1])
    squares = np.square((x[:, None] - x[None]) / lengths)
    smooth = np.exp(-squares.sum(-1) / 2)
    same = groups[:, None] == groups[None]
    shaped = (amplitudes[0] + same * amplitudes[1]) * smooth
    noise = np.exp(2 * scales[-1]) / trust
    factor = cholesky(shaped + same * amplitudes[2] + np.diag(noise), lower=True)
    inverse = cho_solve((factor, True), np.eye(len(y)))
    weights = inverse @ y
    slope = inverse - np.outer(weights, weights)
    sloped = slope * shaped
    gradient = [
        *(np.einsum("ij,ijk->k", sloped, squares) / 2),
        (slope * smooth).sum() * amplitudes[0],
        (slope * smooth * same).sum() * amplitudes[1],
        (slope * same).sum() * amplitudes[2],
        np.diag(slope) @ noise,
    ]
    loss = float(y @ weights / 2 + np.log(np.diag(factor)).sum())
    return loss, np.array(gradient)


def _solved(
    scales: FloatArray, x: FloatArray, groups: FloatArray, y: FloatArray, trust: FloatArray
) -> tuple[FloatArray, FloatArray]:
    covariance = _covariance(scales, x, groups, x, groups)
    covariance[np.diag_indices(len(y))] += np.exp(2 * scales[-1]) / trust
    inverse = cho_solve((cholesky(covariance, lower=True), True), np.eye(len(y)))
    return inverse, inverse @ y
