"""Slopes: bounds of seconds and bytes as lengths move, from tables at a few probes.

Seconds and bytes are sums of products of lengths, so their logarithms are convex in the logarithms
of what lengths consist of. A slope through today's lengths then bounds them from below, and what it
misses at the edges of a box bounds them from above inside it. The shape of the distribution moves
by its gaps, from one known quantile to the next, in means: decoding takes a sum over the gaps, each
at the pace of those still alive in it, so that its logarithm bends little and evenly. Both are
measured, number by number, so that one that bends otherwise gets the margin that it needs at the
probes.
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
from nereus_core.observation import QUANTILE_LEVELS
from nereus_core.planner.pareto import front

_SIZES = 4
"""Coordinates before the shape: prompt mean, response mean, p95 above it, maximum above that."""
_REACH = np.log([1.5, 1.5, 1.5, 2.5])
"""How far each of these may move, either way, in logarithms; chosen. The longest response of a step
is chance: two steps of 1,000 responses differ by a factor of two in how far it lies out."""
_GAP_REACH = 0.05
"""How far any gap may move, in means, beside a part of itself; chosen."""
_GAP_PARTS = np.array([0.6] * (len(QUANTILE_LEVELS) - 1) + [1.5])
"""That part; chosen, wider for the longest response."""
_NOTHING = 1e-3
"""Tokens that stand for none, which has no logarithm."""


def _sizes(lengths: Lengths) -> FloatArray:
    """Logarithms of the first coordinates."""
    parts = (
        lengths.prompt_mean,
        lengths.response_mean,
        lengths.response_p95 - lengths.response_mean,
        lengths.response_max - lengths.response_p95,
    )
    return np.array([math.log(max(part, _NOTHING)) for part in parts])


def _gaps(lengths: Lengths) -> FloatArray:
    """Gaps between known quantiles, in means; none where the shape is assumed."""
    gaps = np.array(lengths.response_quantiles)
    gaps[1:] -= gaps[:-1].copy()
    return gaps / max(lengths.response_mean, _NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Lengths around some, in units of how far each coordinate may move."""

    middle: Lengths
    sizes: FloatArray
    gaps: FloatArray
    gap_reach: FloatArray

    @classmethod
    def around(cls, lengths: Lengths) -> Self:
        """The box that is probed."""
        gaps = _gaps(lengths)
        return cls(lengths, _sizes(lengths), gaps, _GAP_REACH + _GAP_PARTS[: len(gaps)] * gaps)

    def place(self, lengths: Lengths) -> FloatArray | None:
        """Where lengths lie in the box [coordinate], in -1 to 1; None outside."""
        gaps = _gaps(lengths)
        if len(gaps) != len(self.gaps):
            return None
        sizes = (_sizes(lengths) - self.sizes) / _REACH
        at = np.concatenate([sizes, (gaps - self.gaps) / self.gap_reach])
        return at if np.abs(at).max() <= 1 else None

    def sizes_probed(self) -> list[Lengths]:
        """Lengths to look at: the middle, each size up and down, all up and all down."""
        return [self._moved(by) for by in _probes()]

    def shapes_probed(self) -> list[tuple[Lengths, Lengths]]:
        """Per gap, lengths with a wider and with a narrower one, as far as it can be narrower."""
        found = []
        for i, reach in enumerate(self.gap_reach):
            up, down = np.zeros((2, len(self.gaps)))
            up[i], down[i] = reach, -self._narrower(i)
            found.append((self._reshaped(up), self._reshaped(down)))
        return found

    @property
    def down(self) -> FloatArray:
        """How far each gap is narrowed at its probe [gap], in units of its reach."""
        return np.array([self._narrower(i) for i in range(len(self.gaps))]) / self.gap_reach

    def _narrower(self, gap: int) -> float:
        """How far a gap is narrowed; what has little to lose is not narrowed at all."""
        reach, own = float(self.gap_reach[gap]), float(self.gaps[gap])
        return min(reach, own) if own > reach / 2 else 0.0

    def _moved(self, by: FloatArray) -> Lengths:
        prompt, mean, tail, last = np.exp(self.sizes + _REACH * by).tolist()
        return replace(
            self.middle,
            prompt_mean=prompt,
            response_mean=mean,
            response_p95=mean + tail,
            response_max=mean + tail + last,
            response_quantiles=tuple((np.cumsum(self.gaps) * mean).tolist()),
        )

    def _reshaped(self, by: FloatArray) -> Lengths:
        quantiles = np.cumsum(self.gaps + by) * self.middle.response_mean
        return replace(self.middle, response_quantiles=tuple(quantiles.tolist()))


def _probes() -> FloatArray:
    """Moves of the sizes [probe, size]."""
    axes, both = np.eye(_SIZES), np.ones((1, _SIZES))
    return np.concatenate([np.zeros((1, _SIZES)), axes, -axes, both, -both])


@dataclass(frozen=True, slots=True, eq=False)
class Slopes:
    """Bounds of positive numbers that depend on lengths; places are those of a `Box`."""

    middle: FloatArray
    """Their logarithms today [number]."""
    slope: FloatArray
    """[number, coordinate]."""
    bent_down: FloatArray
    """Roots of how far they lie below the slope at most, in logarithms [number, 1 + gap]: as sizes
    move, then at the edge of each gap."""
    bent_up: FloatArray
    """The same above it, at the edges of sizes."""

    @classmethod
    def of(cls, sizes: FloatArray, up: FloatArray, down: FloatArray, way_down: FloatArray) -> Self:
        """Measure numbers at every probe.

        Args:
            sizes: at `Box.sizes_probed` [probe, number].
            up: with each gap wider [gap, number].
            down: with each gap narrower [gap, number].
            way_down: `Box.down`.
        """
        logs, logs_up, logs_down = (np.log(np.maximum(v, 1e-30)) for v in (sizes, up, down))
        slope = ((logs[1:5] - logs[5:9]) / 2).T
        missed = logs - logs[0] - _probes() @ slope.T
        tilt = (logs_up - logs_down) / (1 + way_down)[:, None]
        off_up, off_down = logs_up - logs[0] - tilt, logs_down - logs[0] + tilt * way_down[:, None]
        # What bends by m over a part of the reach bends by m / part^2 over all of it. A chord says
        # nothing of the arc: a sum of which one term grows, log(1 + x), rises x^2 / 8 above it.
        arc = np.where(way_down > 0, 0.0, 1.0)[:, None] * tilt**2 / 8
        off_down = off_down / np.where(way_down > 0, way_down, 1.0)[:, None] ** 2
        low, high = np.minimum(off_up, off_down), np.maximum(np.maximum(off_up, off_down), arc)
        return cls(
            logs[0],
            np.concatenate([slope, tilt.T], axis=1),
            np.sqrt(np.maximum(0.0, np.concatenate([-missed.min(axis=0)[None], -low]))).T,
            np.sqrt(np.maximum(0.0, np.concatenate([missed.max(axis=0)[None], high]))).T,
        )

    @classmethod
    def joined(cls, several: Sequence[Slopes]) -> Self:
        """One after another."""
        return cls(
            np.concatenate([s.middle for s in several]),
            np.concatenate([s.slope for s in several]),
            np.concatenate([s.bent_down for s in several]),
            np.concatenate([s.bent_up for s in several]),
        )

    def take(self, rows: IntArray) -> Slopes:
        """Return some of the numbers."""
        return Slopes(self.middle[rows], self.slope[rows], self.bent_down[rows], self.bent_up[rows])

    def least_logs(self, at: FloatArray) -> FloatArray:
        """Logarithms of lower bounds at a place.

        What bends along several coordinates bends by no more than the square of the sum of roots.
        """
        way = np.abs(at[_SIZES - 1 :])
        way[0] = 1.0
        bent = self.bent_down @ way
        return np.asarray(self.slope @ at + self.middle - bent * bent)

    def most(self, at: FloatArray) -> FloatArray:
        """Upper bounds: a convex gap grows at most in proportion to the way to the edge."""
        way = np.abs(at)
        way[_SIZES - 1] = math.sqrt(way[:_SIZES].max())
        bent = self.bent_up @ way[_SIZES - 1 :]
        return np.asarray(np.exp(self.slope @ at + self.middle + bent * bent))

    def undominated(self, further: FloatArray) -> IntArray:
        """Numbers of which no other is lower all over the box and in further columns, ascending.

        Lower bounds are monotone in each size at any shape, so that corners tell.
        """
        corners = np.array(list(product((-1.0, 1.0), repeat=_SIZES)))
        tilted = np.abs(self.slope[:, _SIZES:]).sum(axis=1)
        edge, below = self.bent_down.sum(axis=1) ** 2, self.bent_down[:, 0] ** 2
        middle = self.slope[:, :_SIZES] @ corners.T + self.middle[:, None]
        most = np.column_stack([further, middle + (tilted - below)[:, None]])
        least = np.column_stack([further, middle - (tilted + edge)[:, None]])
        kept = front(most)
        beaten = np.zeros(len(most), dtype=np.bool_)
        for row in kept:
            beaten |= (most[row] <= least).all(axis=1)
        beaten[kept] = False
        return np.flatnonzero(~beaten)
