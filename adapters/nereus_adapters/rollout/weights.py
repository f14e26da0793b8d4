"""Weights on their way to engines: cells of tensors, published once, read by whom they belong to.

A trainer's devices hold shards; an engine's ranks need others. `assign` gives every part of the
model to one device that holds it (the routes of the core), and cuts it into *cells*: the finest
boxes that any layout of an engine consists of. Each device writes its cells, once, into a segment
of shared memory with a digest for each (`publish`). Every rank of every engine of any layout then
reads the cells of its own boxes, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import xxhash
from numpy.typing import NDArray

from nereus_adapters.rollout.segment import Segment
from nereus_core.cluster import Device
from nereus_core.errors import NereusError
from nereus_core.layout import Layout, layouts
from nereus_core.model import ModelSpec
from nereus_core.state import Box, Shard, routes, tensor_rules, unit_shards

VOCAB_MULTIPLE = 64
"""Engines pad a vocabulary to a multiple of it before they cut it.

Source: vLLM 0.32 vocab_parallel_embedding.py DEFAULT_VOCAB_PADDING_SIZE; SGLang 0.5 has the same.
"""
_VOCAB_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_STAGING = Device("the segments", 0)

Read = Callable[[str, Box], NDArray[np.generic]]
"""Gives a box of a logical tensor that a device holds; bfloat16 as its 16-bit pattern."""


class GarbledWeights(NereusError):
    """A cell does not have the digest that it was published with."""

    def __init__(self, tensor: str, box: Box, version: int) -> None:
        super().__init__(
            f"{tensor} at {box.offset} of weights version {version} arrived with another digest "
            "than it was published with; the engine is to be rebuilt."
        )

    @classmethod
    def said(cls, words: str) -> GarbledWeights:
        """Return the error that another process put into words."""
        error = cls.__new__(cls)
        error.args = (words,)
        return error


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of a logical tensor."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Piece:
    """A cell in a segment of shared memory."""

    cell: Cell
    segment: str
    offset: int
    num_bytes: int
    digest: int
    """xxh3 of the bytes."""

    def check(self, content: memoryview | bytes, version: int) -> None:
        """Raise GarbledWeights unless bytes are those that were published."""
        if xxhash.xxh3_64_intdigest(content) != self.digest:
            raise GarbledWeights(self.cell.tensor, self.cell.box, version)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What each rank of one engine reads for one version."""

    version: int
    dtype: str
    """As torch names it."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of whole logical tensors."""
    ranks: tuple[tuple[Piece, ...], ...]
    """By local rank; cells of one tensor follow one another."""

    @property
    def num_bytes(self) -> int:
        """Bytes that all ranks read."""
        return sum(piece.num_bytes for rank in self.ranks for piece in rank)


def engine_shards(model: ModelSpec, layout: Layout) -> tuple[Shard, ...]:
    """Return the boxes that each rank of an engine loads: the core's, but for padded vocabularies.

    A rank whose rows are padding alone holds no box of that tensor.
    """
    rows = -(-model.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // layout.tp
    shards = []
    for rank, shard in enumerate(unit_shards(model, layout)):
        boxes = dict(shard)
        start = rank % layout.tp * rows
        for name in _VOCAB_TENSORS:
            if name in boxes:
                del boxes[name]
                if start < model.vocab:
                    count = min(rows, model.vocab - start)
                    boxes[name] = Box((start, 0), (count, model.hidden))
        shards.append(boxes)
    return tuple(shards)


def assign(
    model: ModelSpec, holders: Iterable[tuple[Device, Shard]], max_devices: int
) -> dict[Device, tuple[Cell, ...]]:
    """Say which cells each device publishes; together they are the model, each part once.

    Args:
        model: shapes.
        holders: devices of the train stage with what they hold.
        max_devices: of the largest engine there may be.

    Raises:
        KeyError: a part of the model is held nowhere.
    """
    held = list(holders)
    cuts = _cuts(model, max_devices)
    whole = unit_shards(model, Layout(1, 1))[0]
    found: dict[Device, list[Cell]] = defaultdict(list)
    for route in routes(held, [(_STAGING, whole)]):
        lines = [_within(points, o, n) for points, o, n in _axes(cuts[route.tensor], route.box)]
        for edges in product(*(list(pairwise(line)) for line in lines)):
            box = Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
            found[route.source].append(Cell(route.tensor, box))
    return {device: tuple(cells) for device, cells in sorted(found.items())}


def _axes(cuts: tuple[frozenset[int], ...], box: Box) -> Iterable[tuple[frozenset[int], int, int]]:
    return zip(cuts, box.offset, box.shape, strict=True)


def _within(points: frozenset[int], offset: int, length: int) -> list[int]:
    end = offset + length
    return [offset, *sorted(p for p in points if offset < p < end), end]


def _cuts(model: ModelSpec, max_devices: int) -> dict[str, tuple[frozenset[int], ...]]:
    """Return, per tensor and dimension, where the boxes of any engine begin or end."""
    found: dict[str, list[set[int]]] = {
        rule.name: [set() for _ in rule.shape] for rule in tensor_rules(model)
    }
    for tp in sorted({layout.tp for layout in layouts(model, max_devices, "divisors")}):
        for shard in engine_shards(model, Layout(tp, 1)):
            for name, box in shard.items():
                for points, start, end in zip(found[name], box.offset, box.end, strict=True):
                    points |= {start, end}
    return {name: tuple(map(frozenset, points)) for name, points in found.items()}


def cells_bytes(cells: Iterable[Cell], dtype: str) -> int:
    """Return the bytes of a segment that takes cells of a type, as torch names it."""
    size = DTYPE_BYTES[dtype]
    return sum(padded(cell.box.num_elements * size) for cell in cells)


def publish(name: str, cells: Sequence[Cell], read: Read) -> tuple[Piece, ...]:
    """Write one device's cells into a segment; called where the device's tensors are.

    Args:
        name: of a segment that has `cells_bytes`, reserved by whoever is to hold it.
        cells: to be written, in this order.
        read: gives their values.
    """
    pieces, offset = [], 0
    with Segment(name, writable=True) as segment:
        for cell in cells:
            array = np.ascontiguousarray(read(cell.tensor, cell.box))
            content = array.reshape(-1).view(np.uint8)
            with segment.view(offset, content.nbytes) as place:
                place[:] = content.data
            digest = xxhash.xxh3_64_intdigest(content.data)
            pieces.append(Piece(cell, name, offset, content.nbytes, digest))
            offset += padded(content.nbytes)
    return tuple(pieces)


def padded(num_bytes: int) -> int:
    """Return bytes up to the next multiple of a cache line."""
    return -(-num_bytes // 64) * 64


@dataclass(frozen=True, slots=True)
class Published:
    """One version of the weights of a model, complete, in segments of this host."""

    version: int
    model: ModelSpec
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the model; each part was written once."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def segments(self) -> frozenset[str]:
        """Names of the segments it lies in."""
        return frozenset(piece.segment for piece in self.pieces)

    def manifest(self, layout: Layout) -> Manifest:
        """Say what each rank of an engine in a layout reads.

        Raises:
            KeyError: a part that a rank needs was not published whole; names tensor and box.
        """
        by_tensor: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            by_tensor[piece.cell.tensor].append(piece)
        shapes = {rule.name: rule.shape for rule in tensor_rules(self.model)}
        ranks = tuple(
            tuple(
                piece
                for tensor, box in shard.items()
                for piece in _covering(by_tensor[tensor], box, tensor)
            )
            for shard in engine_shards(self.model, layout)
        )
        return Manifest(self.version, self.dtype, shapes, ranks)


def _covering(pieces: Iterable[Piece], box: Box, tensor: str) -> list[Piece]:
    found = [p for p in pieces if p.cell.box.intersect(box) == p.cell.box]
    if sum(p.cell.box.num_elements for p in found) != box.num_elements:
        raise KeyError(f"{tensor} at {box.offset} shape {box.shape} was not published whole")
    return found
