"""A Gaussian process over rows of several campaigns: what all share, and what each adds.

Covariance of two rows: a smooth part over the features, the same smooth shape again for rows of
one campaign, a constant per campaign, and noise with heavy tails (Student t, by reweighting), so
that a row nothing explains does not bend its neighbors. Scales are those of the greatest marginal
likelihood (Rasmussen and Williams 2006, 5.4.1). Intervals are conformal: quantiles of the residuals
of rows left out, fold by fold, over their own standard deviation (Vovk et al. 2005).
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
_FOLDS = 5


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
            weights = _solved(scales, x, groups, y, trust)[1]
            trust = _trusted(scales, weights, trust)
        weights = _solved(scales, x, groups, y, trust)[1]
        rank = min(1.0, confidence * (1 + 1 / len(y)))
        stretch = float(np.quantile(_left_out(scales, x, groups, y), rank))
        covariance = _covariance(scales, x, groups, x, groups)
        covariance[np.diag_indices(len(y))] += np.exp(2 * scales[-1]) / trust
        factor = cholesky(covariance, lower=True)
        return cls(features, groups, center, spread, scales, mean, factor, weights, trust, stretch)

    def predict(self, features: FloatArray, groups: FloatArray) -> Prediction:
        """Predict new rows; an unseen campaign gets what all share."""
        x = (self.features - self.center) / self.spread
        new = (features - self.center) / self.spread
        between = _covariance(self.scales, new, groups, x, self.groups)
        deviation = _deviation(self.scales, self.factor, between)
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


def _trusted(scales: FloatArray, weights: FloatArray, trust: FloatArray) -> FloatArray:
    """Trust in each row, at most (freedom + 1) / freedom: low where its residual is large."""
    noise = np.exp(2 * scales[-1])
    residuals = noise / trust * weights
    return np.asarray((_FREEDOM + 1) / (_FREEDOM + np.square(residuals) / noise))


def _deviation(scales: FloatArray, factor: FloatArray, between: FloatArray) -> FloatArray:
    """Standard deviation of new rows: a row has typical noise until it is seen."""
    solved = solve_triangular(factor, between.T, lower=True)
    own = np.exp(2 * scales[-4:]).sum() - np.square(solved).sum(0)
    return np.sqrt(np.maximum(own, np.exp(2 * scales[-1])))


def _left_out(scales: FloatArray, x: FloatArray, groups: FloatArray, y: FloatArray) -> FloatArray:
    """Residuals of rows left out, fold by fold, over their stated standard deviation.

    Trust is found anew from the rows that are left: that of all rows would have seen the others.
    """
    folds = np.random.default_rng(0).integers(0, _FOLDS, len(y))
    found = np.zeros(len(y))
    for fold in np.unique(folds):
        gone, rest = folds == fold, folds != fold
        trust = np.ones(int(rest.sum()))
        for _ in range(_REWEIGHTINGS):
            weights = _solved(scales, x[rest], groups[rest], y[rest], trust)[1]
            trust = _trusted(scales, weights, trust)
        weights = _solved(scales, x[rest], groups[rest], y[rest], trust)[1]
        covariance = _covariance(scales, x[rest], groups[rest], x[rest], groups[rest])
        covariance[np.diag_indices(len(trust))] += np.exp(2 * scales[-1]) / trust
        between = _covariance(scales, x[gone], groups[gone], x[rest], groups[rest])
        deviation = _deviation(scales, cholesky(covariance, lower=True), between)
        found[gone] = np.abs(y[gone] - between @ weights) / deviation
    return found


def _solved(
    scales: FloatArray, x: FloatArray, groups: FloatArray, y: FloatArray, trust: FloatArray
) -> tuple[FloatArray, FloatArray]:
    covariance = _covariance(scales, x, groups, x, groups)
    covariance[np.diag_indices(len(y))] += np.exp(2 * scales[-1]) / trust
    inverse = cho_solve((cholesky(covariance, lower=True), True), np.eye(len(y)))
    return inverse, inverse @ y
