"""Continuous batching over a distribution of response lengths: how many decode, and how long.

A unit has slots for C of its S sequences at once. While sequences wait, a slot whose sequence ends
takes the next one, so all slots are busy; when none waits, the batch shrinks as sequences end, and
the longest decide when decoding stops. Slots are renewal processes whose lifetimes are response
lengths: starts follow ``m(t) = f(t) + sum_s m(s) f(t - s)``, the queue is empty when S / C starts
per slot have happened, and those alive afterwards are the starts whose length exceeds their age
(Cox 1962, Renewal Theory). Time is counted in decode iterations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import Column, FloatArray
from nereus_core.errors import CostInputError
from nereus_core.observation import QUANTILE_LEVELS

_CELLS = 16
"""Cells of time per mean length; chosen: 64 change iterations by less than 1%."""
_MIXED = 8.0
"""Starts per slot after which slots are taken to have forgotten that they began together."""
_LAST_ALIVE = math.exp(-0.5772)
"""Expected number alive when the last one ends on average: exp(-Euler's constant), as for
exponential tails."""
_PARTS = 10
"""Stretches into which the shrinking of the batch is cut."""
_KNEE = -math.log(0.05)
_BODY = np.linspace(0.0, 0.95, 49)
_BODY_DEPTHS = -np.log1p(-(_BODY[1:] + _BODY[:-1]) / 2)


def _depth(batch: int) -> float:
    """Minus the logarithm of the part of sequences that are as long as the longest: one of them."""
    return max(_KNEE + 0.1, math.log(max(batch, 1)))


@lru_cache(maxsize=256)
def response_classes(lengths: Lengths, batch: int) -> tuple[FloatArray, FloatArray]:
    """Representative response lengths, ascending, and their parts of all; mean as in ``lengths``.

    Between known figures a length is linear in its depth, minus the logarithm of the part that is
    longer, as for exponential tails; the longest is one of ``batch``. Without quantiles the body
    rises as a power of the depth that gives the mean.
    """
    deepest = _depth(batch)
    tail_depths = np.linspace(_KNEE, deepest, 17)
    depths = np.concatenate([_BODY_DEPTHS, (tail_depths[1:] + tail_depths[:-1]) / 2, [deepest]])
    weights = np.concatenate([np.diff(_BODY), -np.diff(np.exp(-tail_depths)), [math.exp(-deepest)]])
    mean, p95, longest = lengths.response_mean, lengths.response_p95, lengths.response_max
    if lengths.response_quantiles:
        known = np.append(-np.log1p(-np.array(QUANTILE_LEVELS[:-1])), np.inf)
        known = np.minimum(known, deepest)
        found = np.interp(depths, known, lengths.response_quantiles)
        found[-1] = lengths.response_quantiles[-1]
    elif p95 <= mean * (1 + 1e-9):
        found = np.full(len(depths), mean)
    else:
        beyond = np.clip((depths - _KNEE) / (deepest - _KNEE), 0.0, 1.0)
        tail, inside = p95 + (longest - p95) * beyond, np.minimum(depths / _KNEE, 1.0)
        low, high = 0.0, 60.0
        for _ in range(40):
            power = (low + high) / 2
            found = np.where(depths < _KNEE, p95 * inside**power, tail)
            low, high = (power, high) if found @ weights > mean else (low, power)
    if not lengths.response_quantiles:
        found[-1] = longest
    # The longest stays: the rest takes up what is missing to the mean.
    head = float(found[:-1] @ weights[:-1])
    scale = (mean - float(found[-1] * weights[-1])) / max(head, 1e-9)
    if scale > 0:
        found = np.append(np.minimum(found[:-1] * scale, found[-1]), found[-1])
    return found * mean / max(float(found @ weights), 1e-9), weights


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """What happens in the slots of a unit, in stretches of decode iterations.

    In the first part every slot is busy; in the others the batch shrinks. Shapes: [num_parts].
    """

    ends: FloatArray
    """Iteration at which each part ends."""
    alive: FloatArray
    """Mean part of the slots that are busy."""
    age: FloatArray
    """Mean tokens that those alive have generated."""
    fall: tuple[FloatArray, FloatArray]
    """Iterations, and the part of the slots still busy after each, falling from 1."""

    def last(self, slots: Column) -> FloatArray:
        """Iterations until the last of so many slots, over all units, is done."""
        level = np.minimum(1.0, _LAST_ALIVE / np.maximum(slots, _LAST_ALIVE))
        iterations, left = self.fall
        return np.asarray(np.interp(-np.log(level), -np.log(left), iterations))


@lru_cache(maxsize=1024)
def timeline(lengths: Lengths, batch: int, rounds: float) -> Timeline:
    """Follow slots that take ``rounds`` sequences each, one after another.

    Raises:
        CostInputError: fewer than one sequence per slot.
    """
    if not 1 <= rounds < math.inf:
        raise CostInputError("sequences per slot", rounds, "one or more")
    if rounds > _MIXED:
        settled = timeline(lengths, batch, _MIXED)
        more = (rounds - _MIXED) * lengths.response_mean
        iterations, left = settled.fall
        return replace(settled, ends=settled.ends + more, fall=(iterations + more, left))
    cell, survival, starts = _renewal(lengths, batch)
    begun = np.cumsum(starts)
    # The queue empties in this cell, whose starts are taken in part.
    empty = int(np.searchsorted(begun, rounds - 1e-9))
    taken = starts[: empty + 1].copy()
    taken[-1] -= max(0.0, begun[empty] - rounds)
    ages = np.arange(len(survival)) * cell
    alive = np.convolve(taken, survival)
    aged = np.convolve(taken, survival * ages)
    shrinking, old = alive[empty:], aged[empty:] / np.maximum(alive[empty:], 1e-12)
    lowest = math.exp(-_depth(batch))
    cuts = _cuts(shrinking, lowest)
    busy_until = empty * cell
    middles = [slice(a, b) for a, b in pairwise(cuts)]
    return Timeline(
        np.array([busy_until, *(busy_until + (c - cuts[0]) * cell for c in cuts[1:])]),
        np.array([1.0, *(shrinking[m].mean() for m in middles)]),
        np.array(
            [
                (aged[: empty + 1] / np.maximum(alive[: empty + 1], 1e-12)).mean(),
                *(np.average(old[m], weights=shrinking[m]) for m in middles),
            ]
        ),
        (
            busy_until + np.arange(cuts[-1] + 1) * cell,
            np.minimum.accumulate(np.clip(shrinking[: cuts[-1] + 1], _LAST_ALIVE * lowest, 1.0)),
        ),
    )


@lru_cache(maxsize=256)
def _renewal(lengths: Lengths, batch: int) -> tuple[float, FloatArray, FloatArray]:
    """Iterations per cell, P(length > age) per cell of age, and starts per slot and cell."""
    responses, weights = response_classes(lengths, batch)
    cell = max(lengths.response_mean / _CELLS, 1e-9)
    # A length between two cells is split between them, so that means stay exact.
    scaled = np.maximum(responses / cell, 1.0)
    whole = np.floor(scaled).astype(np.int64)
    ends = np.zeros(int(whole[-1]) + 3)
    np.add.at(ends, whole, weights * (1 - (scaled - whole)))
    np.add.at(ends, whole + 1, weights * (scaled - whole))
    survival = np.maximum(0.0, 1 - np.cumsum(ends))
    survival[-1] = 0.0
    lags = np.flatnonzero(ends)
    parts = ends[lags]
    # Starts per slot grow by about one per mean length; enough of them for `_MIXED` rounds.
    cells = int((_MIXED + 1) * _CELLS) + len(ends)
    starts = np.zeros(cells + len(ends))  # padded in front, so that no lag reaches before time 0
    starts[len(ends)] = 1.0
    for now in range(len(ends) + 1, len(starts)):
        starts[now] = starts[now - lags] @ parts
    return cell, survival, starts[len(ends) :]


def _cuts(shrinking: FloatArray, lowest: float) -> FloatArray:
    """Indices at which the shrinking is cut: equal steps of the logarithm of those alive."""
    final = int(np.argmax(shrinking < lowest / 2)) if (shrinking < lowest / 2).any() else -1
    final = len(shrinking) - 1 if final <= 0 else final
    levels = np.geomspace(1.0, lowest, _PARTS + 1)[1:-1]
    inner = np.searchsorted(-shrinking[:final], -levels)
    return np.unique([0, *inner, final])


def cache_slots(
    lengths: Lengths, batch: int, sequences: FloatArray, cache_tokens: FloatArray
) -> FloatArray:
    """Sequences that a cache of so many tokens keeps decoding at once; at least one.

    An engine admits while prompts fit and evicts when grown responses do not. Slots that began
    together need ``max over t of P(length > t) (prompt + t)`` tokens each; slots that take one
    sequence after another need a prompt and the mean age, ``E[L^2] / 2 E[L]``, of a busy slot.

    Raises:
        CostInputError: a negative cache.
    """
    if float(np.min(cache_tokens)) < 0:
        raise CostInputError("cache tokens", float(np.min(cache_tokens)), "zero or more")
    together, apart = slot_tokens(lengths, batch)
    alone = cache_tokens / together
    return np.asarray(
        np.clip(
            np.where(alone >= sequences, sequences, cache_tokens / max(together, apart)),
            1.0,
            sequences,
        )
    )


@lru_cache(maxsize=256)
def slot_tokens(lengths: Lengths, batch: int) -> tuple[float, float]:
    """Cached tokens that a slot needs when all began together, and when they did not."""
    responses, weights = response_classes(lengths, batch)
    longer = 1 - np.cumsum(weights) + weights
    together = float((longer * (lengths.prompt_mean + responses)).max())
    mean_age = float(weights @ responses**2) / max(2 * lengths.response_mean, 1e-9)
    return together, lengths.prompt_mean + mean_age


def evicted_tokens(lengths: Lengths, sequences: FloatArray, slots: FloatArray) -> FloatArray:
    """Tokens that have to be computed again because their sequences were evicted.

    A sequence that ends leaves a prompt and a response of room. While others wait, prompts are
    admitted into all of it at once; those who go on grow by as much as responses are long until the
    next one ends, and the newest are evicted for it, who have hardly more than their prompts. Room
    too small for a prompt stays free for growth: between none and half a prompt of it, so a quarter
    is taken off (chosen; within 15% of all tokens of an event simulation).
    """
    evicted = max(0.0, lengths.response_mean - lengths.prompt_mean / 4)
    return np.asarray((sequences - slots) * evicted)
