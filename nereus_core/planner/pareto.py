"""Pareto fronts: the rows that no other row beats in every column."""

from __future__ import annotations

import numpy as np

from nereus_core.cost.op_classes import FloatArray, IntArray


def front(rows: FloatArray) -> IntArray:
    """Indices of the rows that are on the front (all columns minimized), best first column first.

    Of equal rows the first is kept. Cost: O(rows x front), vectorized over rows.
    """
    left = np.lexsort(rows.T[::-1])
    kept: list[int] = []
    while len(left):
        # In lexicographic order no later row can dominate the first one.
        kept.append(int(left[0]))
        left = left[(rows[left] < rows[left[0]]).any(axis=1)]
    return np.array(kept, dtype=np.int64)
