"""The two steps of a Kalman filter for one measured number, kept apart so that gains can be cut."""

from __future__ import annotations

import math

import numpy as np

from nereus_core.cost.op_classes import FloatArray


def gain(covariance: FloatArray, jacobian: FloatArray, noise: float) -> tuple[FloatArray, float]:
    """Kalman gain, and the standard deviation of what was to be measured."""
    spread = covariance @ jacobian
    variance = float(jacobian @ spread) + noise**2
    return spread / variance, math.sqrt(variance)


def shrunk(
    covariance: FloatArray, gain: FloatArray, jacobian: FloatArray, noise: float
) -> FloatArray:
    """Covariance after a correction, in Joseph's form: no gain can make a variance negative.

    Source: Bucy and Joseph (1968), "Filtering for Stochastic Processes with Applications".
    """
    kept = np.eye(len(gain)) - np.outer(gain, jacobian)
    after = kept @ covariance @ kept.T + np.outer(gain, gain) * noise**2
    return np.asarray((after + after.T) / 2)
