"""Segment: named shared memory on this host, written by one process and read by others."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Self

FOLDER = Path("/dev/shm")
"""Where POSIX shared memory lies on Linux; a plain file there needs no resource tracker."""
PREFIX = "nereus-weights-"


class Segment:
    """Bytes that have a name. Whoever created it removes the name; mappings outlive that."""

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

    def remove(self) -> None:
        """Remove the name; safe to call twice."""
        (FOLDER / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap; memory that somebody still views is unmapped with the last view."""
        try:
            self._mapping.close()
        except BufferError:
            return
