"""looks: a shard as others want to see it, changed by none of this."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from nereus_adapters.rollout.weights import Cell, Piece, publish
from nereus_adapters.torch.engine import UnitShard
from nereus_adapters.torch.exchange import digest
from nereus_core.state import Box, Slot

Seen = tuple[tuple[int, ...], NDArray[Any]]
"""Offset of a box in its logical tensor, and what it holds; bf16 as its bit pattern."""


def sums(shard: UnitShard) -> dict[str, object]:
    """Return digests of a shard's tensors, and its counters: equal on equal shards."""
    found: dict[str, object] = dict(shard.counters)
    for slot, name in _keys(shard):
        flat = shard.tensor(slot, name).contiguous().view(-1)
        found[f"{slot}/{name}"] = digest(flat).tolist()
    return found


def published(shard: UnitShard, name: str, cells: Sequence[Cell]) -> tuple[Piece, ...]:
    """Write cells of a shard's weights into a segment of this host."""

    def read(tensor: str, box: Box) -> NDArray[Any]:
        return _array(shard.tensor(Slot.PARAM, tensor)[box.within(shard.box(tensor))])

    return publish(name, cells, read)


def tensors(shard: UnitShard) -> dict[str, Seen]:
    """Return all that a shard holds."""
    return {
        f"{slot}/{name}": (shard.box(name).offset, _array(shard.tensor(slot, name)))
        for slot, name in _keys(shard)
    }


def measured_bytes(device: torch.device) -> int:
    """Return the bytes of all distinct storages of tensors on a device that this process has.

    Buffers of modules (rotary frequencies) are left out: they are constants, not state.
    """
    gc.collect()
    things = gc.get_objects()
    # type(), since isinstance asks odd objects for their __class__
    constant = {
        buffer.untyped_storage().data_ptr()
        for module in things
        if issubclass(type(module), torch.nn.Module)
        for buffer in module._buffers.values()
        if buffer is not None
    }
    sizes = {
        storage.data_ptr(): storage.nbytes()
        for thing in things
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device.type
        if (storage := thing.untyped_storage()).data_ptr() not in constant
    }
    return sum(sizes.values())


def _keys(shard: UnitShard) -> Iterator[tuple[Slot, str]]:
    for name in shard.names:
        for slot in shard.slots:
            yield slot, name


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    held = tensor.cpu()
    return (held.view(torch.int16) if held.dtype is torch.bfloat16 else held).numpy()
