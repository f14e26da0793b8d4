"""Extents: which elements of a parameter a rank of ZeRO and AutoTP holds, and what two share.

AutoTP cuts a parameter along one dimension, ZeRO cuts the flattened slice that is left into
intervals. Such an interval is a list of *runs* in the flattened whole parameter; where the lists
of two ranks of different layouts meet, bytes go from one to the other and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Extent:
    """An interval of the flattened slice of a parameter that a tensor-parallel rank has."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int | None
    """Cut by tensor parallelism; None for a parameter that every rank has whole."""
    offset: int
    """Of the slice along ``dim``; 0 where nothing is cut."""
    size: int
    """Of the slice along ``dim``; 1 where nothing is cut."""
    start: int
    """First element of the interval, in the flattened slice."""
    stop: int
    """First element past it."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def inner(self) -> int:
        """Elements that lie together in the slice and in the whole: a row of what is cut."""
        if self.dim is None:
            return prod(self.shape)
        return self.size * prod(self.shape[self.dim + 1 :])

    @property
    def pitch(self) -> int:
        """Elements from one such row to the next in the whole parameter."""
        return prod(self.shape if self.dim is None else self.shape[self.dim :])

    @property
    def shift(self) -> int:
        """Elements before the slice in the first row of the whole parameter."""
        return 0 if self.dim is None else self.offset * prod(self.shape[self.dim + 1 :])

    def runs(self) -> tuple[Indices, Indices]:
        """Return where each run starts in the flattened whole parameter, and its length."""
        first, last = self.start // self.inner, -(-self.stop // self.inner)
        rows = np.arange(first, max(first, last), dtype=np.int64)
        begin = np.maximum(rows * self.inner, self.start)
        end = np.minimum((rows + 1) * self.inner, self.stop)
        starts = (rows * self.pitch + self.shift + begin - rows * self.inner).astype(np.int64)
        lengths = (end - begin).astype(np.int64)
        return starts, lengths


@dataclass(frozen=True, slots=True)
class Overlap:
    """What two extents share: element i of each array is one stretch of ``length`` elements."""

    source: Indices
    """Where it starts in the source's interval, from the interval's own start."""
    target: Indices
    length: Indices

    @property
    def num_elements(self) -> int:
        """Elements in common."""
        return int(self.length.sum())


def overlap(source: Extent, target: Extent) -> Overlap:
    """Intersect two extents of one parameter.

    Cost: O(rows) of the smaller cut; a parameter that is cut along its first dimension, or not at
    all, has one row.
    """
    starts, lengths = source.runs()
    wanted, sizes = target.runs()
    ends, wanted_ends = starts + lengths, wanted + sizes
    low = np.searchsorted(ends, wanted, side="right")
    count = np.maximum(np.searchsorted(starts, wanted_ends, side="left") - low, 0)
    of_target = np.repeat(np.arange(len(wanted)), count)
    of_source = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + low[of_target]
    begin = np.maximum(starts[of_source], wanted[of_target])
    length = np.minimum(ends[of_source], wanted_ends[of_target]) - begin
    at_source = (np.cumsum(lengths) - lengths)[of_source] + begin - starts[of_source]
    at_target = (np.cumsum(sizes) - sizes)[of_target] + begin - wanted[of_target]
    return Overlap(at_source, at_target, length)
