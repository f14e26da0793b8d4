"""Pareto fronts: the rows that no other row beats in every column."""

from __future__ import annotations

import numpy as np

from nereus_core.cost.op_classes import BoolArray, FloatArray, IntArray

_BLOCK = 64
"""Rows compared with each other at once; chosen for speed."""
_EARLIER = np.tri(_BLOCK, k=-1, dtype=np.bool_).T
"""[row, other]: whether the row comes before the other."""


def front(rows: FloatArray) -> IntArray:
    """Indices of the rows that are on the front (all columns minimized), best first column first.

    Of equal rows the first is kept. Cost: O(rows x front), vectorized over blocks of rows.
    """
    if len(rows) < 2:
        return np.arange(len(rows))
    left = np.lexsort(rows.T[::-1])
    kept: list[IntArray] = []
    while len(left):
        # In lexicographic order no later row can dominate an earlier one, unless it is its equal.
        block, left = left[:_BLOCK], left[_BLOCK:]
        members = rows[block]
        earlier = _EARLIER[: len(block), : len(block)]
        beaten = (_covers(members, members) & earlier).any(axis=0)
        block, members = block[~beaten], members[~beaten]
        kept.append(block)
        if len(left):
            left = left[~_covers(members, rows[left]).any(axis=0)]
    return np.concatenate(kept)


def _covers(some: FloatArray, others: FloatArray) -> BoolArray:
    """Whether each of some [n, column] is nowhere worse than each of others [m, column]: [n, m]."""
    found = some[:, None, 0] <= others[None, :, 0]
    for column in range(1, some.shape[1]):
        found &= some[:, None, column] <= others[None, :, column]
    return found
