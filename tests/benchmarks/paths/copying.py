"""The copy bandwidth of the machine: what any transfer between two processes must do at least.

Every rank that lacks something copies as many bytes with memcpy (`Tensor.copy_`) out of memory that
another process has filled and that is mapped here, all of them at the same time; into memory of the
state that the crew is in, cold or warm, as every path. Once with one thread a rank, and once with
as many threads as there are processors for it.

Beside that, what the kernel reaches that copies out of another process (`process_vm_readv`, page by
page, where memcpy streams past the cache): the limit of the way that seats take, with no digest and
as many threads.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from paths.role import Role

from nereus_adapters.torch.reading import copied, own_window

PIECE = 64 * 2**20
_CHUNK = 4 * 2**20
"""Seats read less at a time, to digest it in the cache; a copy alone is quickest like this."""


def path(role: Role) -> None:
    """Measure all, as marks ``one thread``, ``all cores`` and ``kernel`` in seconds."""
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
        own = source.clone() if role.rank == 0 else source
        if role.rank == 0:
            source.fill_(7)
            own_window()  # permits the others to read here
            (role.memory / "where").write_text(f"{os.getpid()} {own.data_ptr()}")
        role.group.barrier()
        pid, there = map(int, (role.memory / "where").read_text().split())
        int(source[::4096].sum())  # its pages are known to this process from here on

        def copy(threads: int, kernel: bool = False) -> None:
            into = [
                torch.empty(min(PIECE, total - start), dtype=torch.uint8)
                for start in range(0, total, PIECE)
            ]

            def piece(index: int) -> None:
                begin = index * PIECE % (4 * PIECE)
                if not kernel:
                    into[index].copy_(source[begin : begin + len(into[index])])
                    return
                here, size = into[index].data_ptr(), len(into[index])
                for at in range(0, size, _CHUNK):
                    local, remote = (
                        np.array([[start + at, min(_CHUNK, size - at)]], dtype=np.uint64)
                        for start in (here, there + begin)
                    )
                    if code := copied(pid, local, remote):
                        raise OSError(code, os.strerror(code))

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(piece, range(len(into))))

        readers = len({r for ranks in role.needers.values() for r in ranks} - _complete(role))
        cores = max(1, len(os.sched_getaffinity(0)) // max(1, readers))
        role.group.barrier()
        role.timed("one thread", lambda: copy(1))
        role.timed("all cores", lambda: copy(cores))
        role.group.barrier()
        role.timed("kernel", lambda: copy(cores, kernel=True))
        role.group.barrier()  # what is read stays until all have read it
        role.moved_bytes += total


def _complete(role: Role) -> set[int]:
    """Ranks that lack nothing."""
    ranks = {r for needers in role.needers.values() for r in needers}
    return {
        rank
        for rank in ranks
        if all(rank in role.holders[k] for k, needers in role.needers.items() if rank in needers)
    }
