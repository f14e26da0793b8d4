"""Boxes in safetensors files: a seat writes its own, and reads whatever of others' it needs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nereus_adapters.torch.engine import UnitShard, digest_box
from nereus_adapters.torch.manifest import Piece, key
from nereus_adapters.torch.values import Region
from nereus_core.errors import CheckpointError
from nereus_core.state import Slot

Key = tuple[Slot, str]


def write_boxes(path: Path, shard: UnitShard, regions: Sequence[Region]) -> list[Piece]:
    """Write boxes of a shard, in all its slots, to a new private file; returns when it is on disk.

    Raises:
        CheckpointError: the file system does not take it.
    """
    tensors = {
        key(slot, name, box): shard.tensor(slot, name).detach().cpu().contiguous()
        for name, box in regions
        for slot in shard.slots
    }
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fchmod(descriptor, 0o600)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            path, f"cannot be written: {error}", "make room, or set checkpoint.folder"
        ) from error
    return [
        Piece(
            name,
            box,
            path.name,
            {slot: digest_box(tensors[key(slot, name, box)], box) for slot in shard.slots},
        )
        for name, box in regions
    ]


def read_boxes(folder: Path, pieces: Sequence[Piece], shard: UnitShard) -> dict[Key, torch.Tensor]:
    """Return a shard's tensors, put together from the parts of pieces that fall into its boxes.

    Raises:
        CheckpointError: a file is broken, or the pieces do not cover what the shard holds.
    """
    found = shard.allocate()
    missing = {name: shard.box(name).num_elements for name in shard.names}
    by_file: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.tensor in missing:
            by_file[piece.file].append(piece)
    for file, mine in by_file.items():
        try:
            with safe_open(folder / file, "pt") as opened:
                for piece in mine:
                    box = shard.box(piece.tensor)
                    common = piece.box.intersect(box)
                    if common is None:
                        continue
                    missing[piece.tensor] -= common.num_elements
                    for slot in shard.slots:
                        part = opened.get_slice(piece.key(slot))[common.within(piece.box)]
                        if part.dtype != shard.dtype(slot):
                            raise CheckpointError(
                                folder / file,
                                f"{piece.key(slot)} is {part.dtype}, not {shard.dtype(slot)}",
                                "resume with the precision that wrote it",
                            )
                        found[slot, piece.tensor][common.within(box)] = part.to(shard.device)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                folder / file, f"cannot be read: {error}", "resume from another checkpoint"
            ) from error
    if short := [name for name, count in missing.items() if count]:
        raise CheckpointError(
            folder, f"holds only a part of {short[0]}", "resume from another checkpoint"
        )
    return found
