"""Pages: where a CPU seat's state lies; what ended state leaves stays with the seat, on call.

To touch a page for the first time costs more than to copy one: the kernel clears it, and the host
of a virtual machine finds it first (6.5 and 0.35 GB/s against 9.7, measured on one core). So the
pages of tensors that are gone are kept, marked as free (`MADV_FREE`): the next state that needs
room lands on them as they are, and when anybody else needs memory the kernel takes them, without
asking this process. A page that is kept holds nothing that counts; it is *warm*.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from bisect import bisect_left
from collections import deque
from math import prod

import numpy as np
import torch

HUGE_PAGE_BYTES = 2 * 2**20
"""Of x86-64 and of most arm64 kernels: the unit that is marked, so that none is torn apart."""
_ALIGN_BYTES = 64
"""A cache line; as torch's own allocator."""
_LEAST_MAPPING_BYTES = 256 * 2**20
"""Asked of the kernel at once; chosen, not measured."""
_MADV_FREE = getattr(mmap, "MADV_FREE", None) if sys.platform == "linux" else None
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)

Range = tuple[int, int]
"""Offset in a mapping where bytes begin, and where they end."""


class Pages:
    """Gives tensors their storage, and takes it back when the last of its views is gone.

    Best fit over the free ranges of a few large mappings. Not for several threads; storage may be
    let go from any.
    """

    def __init__(self) -> None:
        self._mappings: list[_Mapping] = []
        self._returned: deque[tuple[_Mapping, Range]] = deque()
        """By finalizers, which run at any time on any thread; sorted in by the next call."""
        self._held_bytes = self._most_bytes = 0
        """What tensors hold, and the most that they have held."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor with storage of its own, not initialized."""
        size = prod(shape) * dtype.itemsize
        if not size or _MADV_FREE is None:
            return torch.empty(shape, dtype=dtype)
        room = -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        self._sort_in()
        where, at = self._best(room)
        taken = where.take(at, room)
        self._held_bytes += room
        self._most_bytes = max(self._most_bytes, self._held_bytes)
        storage = where.view(taken[0], size)
        weakref.finalize(storage, self._returned.append, (where, taken)).atexit = False
        return torch.frombuffer(storage, dtype=dtype).view(shape)

    def _best(self, room: int) -> tuple[_Mapping, int]:
        """Find the smallest free range that has room; map more where there is none.

        What is mapped stays below twice what was ever held at once, or one mapping more.
        """
        best: tuple[_Mapping, int] | None = None
        least = sys.maxsize
        for where in self._mappings:
            for at, (start, end) in enumerate(where.free):
                if room <= end - start < least:
                    best, least = (where, at), end - start
        if best is not None:
            return best
        made = _Mapping(max(room, _LEAST_MAPPING_BYTES))
        mapped_bytes = sum(where.num_bytes for where in self._mappings)
        if mapped_bytes + made.num_bytes > 2 * self._most_bytes:
            self._mappings = [where for where in self._mappings if not where.is_free]
        self._mappings.append(made)
        return made, 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the mappings in which no tensor lies."""
        self._sort_in()
        return sum(end - start for where in self._mappings for start, end in where.free)

    def warm_bytes(self) -> int:
        """Count those of them that lie in memory now: measured, the kernel may take any."""
        self._sort_in()
        return sum(where.warm_bytes() for where in self._mappings)

    def rest(self) -> None:
        """Leave what is free to the kernel, should it need it: at once, and without a copy."""
        self._sort_in()
        for where in self._mappings:
            where.mark()

    def _sort_in(self) -> None:
        while self._returned:
            where, gone = self._returned.popleft()
            where.put(gone)
            self._held_bytes -= gone[1] - gone[0]


class _Mapping:
    """Anonymous memory on huge pages, and which of it is free."""

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._memory = mmap.mmap(
            -1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if _MADV_HUGEPAGE is not None:
            self._memory.madvise(_MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        first = -address % HUGE_PAGE_BYTES
        self._address, self.num_bytes = address, size
        self._whole = (first, first + size)
        self.free: list[Range] = [self._whole]
        """In order; no two touch."""

    @property
    def is_free(self) -> bool:
        return self.free == [self._whole]

    def take(self, at: int, room: int) -> Range:
        """Take the first bytes of the free range at an index."""
        start, end = self.free[at]
        self.free[at : at + 1] = [(start + room, end)] if start + room < end else []
        return start, start + room

    def put(self, gone: Range) -> None:
        """Make a range free again, one with its neighbors."""
        start, end = gone
        at = bisect_left(self.free, gone)
        after = at
        if at and self.free[at - 1][1] == start:
            at, start = at - 1, self.free[at - 1][0]
        if after < len(self.free) and self.free[after][0] == end:
            after, end = after + 1, self.free[after][1]
        self.free[at:after] = [(start, end)]

    def view(self, start: int, num_bytes: int) -> memoryview:
        """Return bytes as an object that lives as long as they are in use."""
        return memoryview(self._memory)[start : start + num_bytes]

    def mark(self) -> None:
        """Mark the whole huge pages of what is free."""
        assert _MADV_FREE is not None
        first = self._whole[0]
        for start, end in self.free:
            begin = first - (first - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            stop = first + (end - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if begin < stop:
                self._memory.madvise(_MADV_FREE, begin, stop - begin)

    def warm_bytes(self) -> int:
        """Count pages of free ranges that are resident, with `mincore`."""
        call = ctypes.CDLL(None).mincore
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        found = 0
        for start, end in self.free:
            begin, stop = -(-start // mmap.PAGESIZE), end // mmap.PAGESIZE
            if begin < stop:
                pages = np.zeros(stop - begin, dtype=np.uint8)
                at = self._address + begin * mmap.PAGESIZE
                call(at, len(pages) * mmap.PAGESIZE, pages.ctypes.data)
                found += int((pages & 1).sum()) * mmap.PAGESIZE
        return found
