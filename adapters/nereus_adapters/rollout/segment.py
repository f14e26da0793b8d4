"""Segment: memory of this host that one process holds and others map; it ends with its holder.

A segment is a memfd: a file without a name in any folder, held by a file descriptor of the driver.
Others reach it through ``/proc/PID/fd``, which the kernel allows to processes of the same user. So
nothing is left behind however a driver ends, by SIGKILL too, and a small ``/dev/shm`` (64 MB in a
container by default) is no limit.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Self

_held: dict[str, int] = {}
"""Segments that this process holds: name -> descriptor."""
_lock = threading.Lock()


def held() -> frozenset[str]:
    """Return the names of segments that this process holds."""
    with _lock:
        return frozenset(_held)


def remove(names: Iterable[str]) -> None:
    """Let go of segments that this process holds; what is mapped of them stays. Safe to repeat."""
    with _lock:
        for name in names:
            if (descriptor := _held.pop(name, None)) is not None:
                os.close(descriptor)


def reserve(num_bytes: int) -> str:
    """Make a segment, held by this process until `remove`; return its name."""
    descriptor = os.memfd_create("nereus-weights")
    os.ftruncate(descriptor, max(1, num_bytes))
    name = f"{os.getpid()}-{descriptor}-{os.fstat(descriptor).st_ino}"
    with _lock:
        _held[name] = descriptor
    return name


def path(name: str) -> Path:
    """Return where a segment can be opened as a file, while its holder holds it."""
    holder, descriptor, _ = name.split("-")
    return Path(f"/proc/{holder}/fd/{descriptor}")


class Segment:
    """Bytes of a segment, mapped.

    Args:
        name: of the segment.
        writable: map it to be written; otherwise what is written here stays here.

    Raises:
        FileNotFoundError: nobody holds it any more.
        PermissionError: its holder is another user's process.
    """

    def __init__(self, name: str, *, writable: bool = False) -> None:
        self.name = name
        descriptor = os.open(path(name), os.O_RDWR if writable else os.O_RDONLY)
        try:
            # Its holder may have let go of it, and have opened something else since.
            if str(os.fstat(descriptor).st_ino) != name.rpartition("-")[2]:
                raise FileNotFoundError(f"segment {name} is held no more")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
            self._mapping = mmap.mmap(descriptor, 0, access=access)
        finally:
            os.close(descriptor)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes of it, without a copy."""
        return memoryview(self._mapping)[offset : offset + num_bytes]

    def close(self) -> None:
        """Unmap; memory that somebody still views is unmapped with the last view."""
        try:
            self._mapping.close()
        except BufferError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
