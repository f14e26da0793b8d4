"""Segment: named shared memory on this host, written by one process and read by others."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

FOLDER = Path("/dev/shm")
"""Where POSIX shared memory lies on Linux; a plain file there needs no resource tracker."""
PREFIX = "nereus-weights-"
"""Names go on with the process id of the driver, which answers for them."""


def remove(names: Iterable[str]) -> None:
    """Remove names; what is mapped of them stays readable. Safe to call twice."""
    for name in names:
        (FOLDER / name).unlink(missing_ok=True)


def sweep(owner: int) -> None:
    """Remove all segments that were named for a driver that has ended."""
    remove(p.name for p in FOLDER.glob(f"{PREFIX}{owner}-*"))


class Segment:
    """Bytes that have a name, until somebody removes it."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self.name = name
        self._mapping = mapping

    @classmethod
    def create(cls, name: str, num_bytes: int) -> Self:
        """Create; raises FileExistsError for a name that is in use."""
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        descriptor = os.open(FOLDER / name, flags, 0o600)
        try:
            os.ftruncate(descriptor, max(1, num_bytes))
            return cls(name, mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, name: str) -> Self:
        """Open for reading (copy on write); raises FileNotFoundError for one that was removed."""
        descriptor = os.open(FOLDER / name, os.O_RDONLY)
        try:
            return cls(name, mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
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
