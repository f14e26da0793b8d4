"""The copy bandwidth of the machine: what any transfer between two processes must do at least.

Every rank that lacks something copies as many bytes with memcpy (`Tensor.copy_`) out of memory that
another process has filled and that is mapped here, all of them at the same time: once into new
memory, as a transition does, and once more into memory that is there already.
"""

from __future__ import annotations

import mmap

import torch
from paths.role import Role

PIECE = 64 * 2**20


def path(role: Role) -> None:
    """Measure both bandwidths, as marks ``new`` and ``warm`` in seconds."""
    missing = [k for k in role.needed if k not in role.state]
    total = 4 * sum(torch.Size(role.needed[k]).numel() for k in missing)
    file = role.memory / "source"
    if role.rank == 0:
        with file.open("wb") as out:
            out.truncate(PIECE * 4)
    role.group.barrier()
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
        source = torch.frombuffer(mapped, dtype=torch.uint8)
        if role.rank == 0:
            source.fill_(7)
        role.group.barrier()
        int(source[::4096].sum())  # its pages are known to this process from here on
        into: list[torch.Tensor] = []

        def new() -> None:
            for start in range(0, total, PIECE):
                size = min(PIECE, total - start)
                begin = start % (4 * PIECE)
                into.append(
                    torch.empty(size, dtype=torch.uint8).copy_(source[begin : begin + size])
                )

        def warm() -> None:
            for index, piece in enumerate(into):
                begin = index * PIECE % (4 * PIECE)
                piece.copy_(source[begin : begin + len(piece)])

        role.group.barrier()
        role.timed("new", new)
        role.timed("warm", warm)
        role.moved_bytes += total
        into.clear()
