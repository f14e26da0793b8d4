"""Digests of logical tensors that do not depend on how a layout cuts them, and gather nothing.

A digest is a sum modulo 2^128 (two lanes of 64 bits) over a tensor's elements of a mixed value
times a random odd coefficient of its global row and one of its global column. So digests of boxes
add up to the digest of the tensor, and a changed bit or two elements in each other's place change
it (with probability 1 - 2^-64 or so; it guards against accidents, not against an adversary).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nereus_core.errors import Diverged
from nereus_core.state import Box

Words = NDArray[np.uint64]

# One salt per lane and per dimension: fractional digits of pi, so that nothing is hidden in them.
_SALTS = np.array(
    [[0x243F6A8885A308D3, 0x13198A2E03707344], [0xA4093822299F31D0, 0x082EFA98EC4E6C89]],
    dtype=np.uint64,
)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Elements mixed at a time: 512 KiB of words, which fits a core's cache.
_BLOCK = 1 << 16


def digest_box(values: torch.Tensor, box: Box) -> str:
    """Return 32 hex digits for the part of a logical tensor that a box covers.

    Args:
        values: the box's elements, of one or two dimensions and any floating type.
        box: where they are in the logical tensor.
    """
    words = _words(values)
    row_start = 0 if len(box.offset) == 1 else box.offset[0]
    rows, columns = words.shape
    per_block = max(1, _BLOCK // columns)
    across = _coefficients(1, box.offset[-1], columns)
    down = _coefficients(0, row_start, rows)
    by_row = np.empty((2, rows), dtype=np.uint64)
    for start in range(0, rows, per_block):
        mixed = _mixed(words[start : start + per_block])
        for lane in range(2):
            by_row[lane, start : start + per_block] = mixed @ across[lane]
    return "".join(f"{int(by_row[lane] @ down[lane]):016x}" for lane in range(2))


def combine(partials: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Add up the partial digests of a unit's ranks, given in order of local rank.

    A key is ``slot/tensor`` for a box that the rank owns, and ``slot/tensor@rank`` for a copy of
    the box that the named rank owns.

    Raises:
        Diverged: a copy differs from its owner's.
    """
    totals: dict[str, list[int]] = {}
    for rank, partial in enumerate(partials):
        for key, value in partial.items():
            name, _, owner = key.partition("@")
            if owner:
                if partials[int(owner)][name] != value:
                    raise Diverged([f"rank {owner}", f"rank {rank}"], name)
                continue
            lanes = totals.setdefault(name, [0, 0])
            for lane in range(2):
                part = int(value[16 * lane : 16 * lane + 16], 16)
                lanes[lane] = (lanes[lane] + part) % 2**64
    return {name: f"{a:016x}{b:016x}" for name, (a, b) in sorted(totals.items())}


def _words(values: torch.Tensor) -> NDArray[np.unsignedinteger]:
    """View bits as unsigned integers [rows, columns]."""
    flat = values.detach().cpu().contiguous()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    array: NDArray[np.signedinteger] = flat.view(bits).numpy()
    unsigned = array.view(np.dtype(f"u{flat.element_size()}"))
    return unsigned.reshape(1, -1) if unsigned.ndim == 1 else unsigned


def _mixed(words: NDArray[np.unsignedinteger]) -> Words:
    """Spread each word's bits, so that no change stays in the highest bit, where sums lose it."""
    mixed = words.astype(np.uint64)
    mixed += _GOLDEN
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _coefficients(dim: int, start: int, count: int) -> Words:
    """Return odd words [2 lanes, count] for the indices from ``start`` on (SplitMix64)."""
    index = np.arange(start, start + count, dtype=np.uint64)
    bits = index[None] * _GOLDEN + _SALTS[:, dim, None]
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: Words = (bits ^ (bits >> np.uint64(31))) | np.uint64(1)
    return odd
