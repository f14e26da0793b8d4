"""How stages share a group of devices: undominated ways under the memory that they share.

What stays of each stage adds up and only the largest of what runs counts. A price per byte tells
early what cannot win: a way so far, completed at the least seconds plus price of the stages to
come, is no faster than its bytes allow (Lagrange; Everett 1963).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus_core.cost.op_classes import FloatArray, IntArray
from nereus_core.planner.pareto import front

_PRICES = np.concatenate([[0.0], np.geomspace(1 / 64, 64, 25)])
"""Prices to try, in average seconds per average byte; chosen, not measured."""
_SLACK = 1e-9
"""Relative: what rounding may do to a sum of seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Undominated ways for a group of stages to share one group of devices.

    Shapes: ``level_s`` [way, level]; ``rows`` [way, stage of the group] are option rows.
    """

    level_s: FloatArray
    rows: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """One stage's undominated ways in a group: columns seconds, bytes that stay, that run."""

    columns: FloatArray
    rows: IntArray
    level: int


def colocated(
    alone: Sequence[Alone], num_levels: int, capacity: float, limit_s: float, whole: bool
) -> Front:
    """Undominated ways to run stages on one group; those slower than the limit may be left out.

    Args:
        alone: per stage.
        num_levels: of the algorithm's graph.
        capacity: bytes of a device.
        limit_s: on the sum of all seconds.
        whole: these are all stages of the job, so that only their sum of seconds matters.
    """
    if not all(len(own.rows) for own in alone):
        return Front(np.zeros((0, num_levels)), np.zeros((0, len(alone)), dtype=np.int64))
    firsts = np.array([own.columns[0] for own in alone])
    if firsts[:, 1].sum() + firsts[:, 2].max() <= capacity:  # the fastest of each fit together
        level_s = np.zeros((1, num_levels))
        for own, seconds in zip(alone, firsts[:, 0], strict=True):
            level_s[0, own.level] += seconds
        return Front(level_s, np.array([[own.rows[0] for own in alone]]))
    price, _, feasible_s = best_price(alone, capacity)
    limit_s = min(limit_s, feasible_s) if whole else limit_s
    limit_s = limit_s * (1 + _SLACK)
    priced = [own.columns[:, 0] + price * own.columns[:, 1] for own in alone]
    least = np.array([[c.min() for c in own.columns.T] for own in alone])
    least_priced = np.array([p.min() for p in priced])
    level_s, total_s = np.zeros((1, num_levels)), np.zeros(1)
    stays, peak = np.zeros(1), np.zeros(1)
    rows = np.zeros((1, 0), dtype=np.int64)
    for i, own in enumerate(alone):
        a = np.repeat(np.arange(len(stays)), len(own.rows))
        b = np.tile(np.arange(len(own.rows)), len(stays))
        seconds, more, runs = own.columns[b].T
        total_s, stays, peak = total_s[a] + seconds, stays[a] + more, np.maximum(peak[a], runs)
        rest_s, rest_bytes = least[i + 1 :, 0].sum(), least[i + 1 :, 1].sum()
        room = capacity - np.maximum(peak, least[i + 1 :, 2].max(initial=0.0))
        bound_s = total_s + price * (stays - room) + least_priced[i + 1 :].sum()
        keep = (stays + rest_bytes <= room) & (np.maximum(total_s + rest_s, bound_s) <= limit_s)
        a, b, total_s, stays, peak = a[keep], b[keep], total_s[keep], stays[keep], peak[keep]
        level_s = level_s[a]
        level_s[:, own.level] += seconds[keep]
        rows = np.concatenate([rows[a], own.rows[b][:, None]], axis=1)
        timed = total_s[:, None] if whole else level_s
        kept = front(np.concatenate([timed, stays[:, None], peak[:, None]], axis=1))
        level_s, total_s, rows = level_s[kept], total_s[kept], rows[kept]
        stays, peak = stays[kept], peak[kept]
    kept = front(level_s.sum(axis=1)[:, None] if whole else level_s)
    return Front(level_s[kept], rows[kept])


def least_s(alone: Sequence[Alone], capacity: float) -> float:
    """Lower bound of the sum of all stages' seconds on one group; inf where one never fits."""
    if not all(len(own.rows) for own in alone):
        return np.inf
    return best_price(alone, capacity)[1]


def best_price(alone: Sequence[Alone], capacity: float) -> tuple[float, float, float]:
    """The price that bounds best, its bound, and the seconds of the fastest feasible way met."""
    mean = np.mean([own.columns.mean(axis=0) for own in alone], axis=0)
    prices = _PRICES * mean[0] / max(mean[1] + mean[2], 1.0)
    total_s, stays, peak = (np.zeros(2 * len(prices)) for _ in range(3))
    bound_s = -prices * (capacity - max(own.columns[:, 2].min() for own in alone))
    for own in alone:
        seconds, keeps, runs = own.columns.T
        priced = seconds + prices[:, None] * keeps
        bound_s = bound_s + priced.min(axis=1)
        both = np.concatenate([priced, priced + prices[:, None] * runs])
        picks = both.argmin(axis=1)
        total_s, stays = total_s + seconds[picks], stays + keeps[picks]
        peak = np.maximum(peak, runs[picks])
    feasible_s = total_s[stays + peak <= capacity].min(initial=np.inf)
    return float(prices[bound_s.argmax()]), float(bound_s.max()), float(feasible_s)
