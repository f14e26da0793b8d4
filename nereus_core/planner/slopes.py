"""Slopes: bounds of seconds and bytes as lengths move, from tables at a few probes.

Seconds and bytes are sums of products of lengths, so their logarithms are convex in the logarithms
of what lengths consist of. A slope through today's lengths then bounds them from below, and what it
misses at the edges of a box bounds them from above inside it. Both are measured, number by number,
so that one that bends otherwise gets the margin that it needs at the probes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import numpy as np

from nereus_core.cost import Lengths
from nereus_core.cost.op_classes import FloatArray, IntArray

REACH = math.log(1.5)
"""How far each part of lengths may move, either way, in logarithms; chosen, not measured."""
_NOTHING = 1e-3
"""Tokens that stand for none, which has no logarithm."""


def coordinates(lengths: Lengths) -> FloatArray:
    """Logarithms of prompt mean, response mean, p95 above it, and maximum above that."""
    parts = (
        lengths.prompt_mean,
        lengths.response_mean,
        lengths.response_p95 - lengths.response_mean,
        lengths.response_max - lengths.response_p95,
    )
    return np.array([math.log(max(part, _NOTHING)) for part in parts])


def probes() -> FloatArray:
    """Moves to look at [probe, coordinate]: none, each part up and down, all up and all down."""
    axes, both = np.eye(4) * REACH, np.full((1, 4), REACH)
    return np.concatenate([np.zeros((1, 4)), axes, -axes, both, -both])


def moved(lengths: Lengths, by: Sequence[float]) -> Lengths:
    """Lengths whose coordinates are so much greater."""
    prompt, mean, tail, last = (float(n) for n in np.exp(coordinates(lengths) + np.array(by)))
    return replace(
        lengths,
        prompt_mean=prompt,
        response_mean=mean,
        response_p95=mean + tail,
        response_max=mean + tail + last,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Slopes:
    """Bounds of positive numbers that depend on lengths."""

    middle: FloatArray
    """Their logarithms today [number]."""
    slope: FloatArray
    """[number, coordinate]."""
    below: FloatArray
    """How far they lie below the slope at most, in logarithms, no more than 0 [number]."""
    above: FloatArray
    """How far they lie above it at the edges, no less than 0 [number]."""

    @classmethod
    def of(cls, values: FloatArray) -> Self:
        """Measure numbers at every probe [probe, number]."""
        logs = np.log(np.maximum(values, 1e-30))
        slope = ((logs[1:5] - logs[5:9]) / (2 * REACH)).T
        missed = logs - logs[0] - probes() @ slope.T
        return cls(logs[0], slope, missed.min(axis=0), missed.max(axis=0))

    @classmethod
    def joined(cls, several: Sequence[Slopes]) -> Self:
        """One after another."""
        return cls(
            np.concatenate([s.middle for s in several]),
            np.concatenate([s.slope for s in several]),
            np.concatenate([s.below for s in several]),
            np.concatenate([s.above for s in several]),
        )

    def take(self, rows: IntArray) -> Slopes:
        """Return some of the numbers."""
        return Slopes(self.middle[rows], self.slope[rows], self.below[rows], self.above[rows])

    def least_at_corners(self) -> FloatArray:
        """Logarithms of the lower bounds at the corners of the box [number, corner].

        They are linear between, so that a number that is no lower at any corner never is.
        """
        corners = np.array(list(product((-REACH, REACH), repeat=4)))
        return np.asarray(self.slope @ corners.T + (self.middle + self.below)[:, None])

    def least(self, by: FloatArray) -> FloatArray:
        """Lower bounds after a move."""
        return np.asarray(np.exp(self.slope @ by + (self.middle + self.below)))

    def most(self, by: FloatArray) -> FloatArray:
        """Upper bounds: a convex gap grows at most in proportion to the way to the edge."""
        part = float(np.abs(by).max()) / REACH
        return np.asarray(np.exp(self.slope @ by + (self.middle + part * self.above)))
