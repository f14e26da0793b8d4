"""Hosts: where weights are written and read: by trainers and engines, each on its own host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from nereus_adapters.rollout.segment import Segment, remove, reserve
from nereus_adapters.rollout.weights import Manifest, Piece, Published
from nereus_core.cluster import Device
from nereus_core.errors import NereusError
from nereus_core.layout import Layout

Place = tuple[Layout, Device]
"""Of an engine: its layout and its first device."""


class HostLost(NereusError):
    """A host is gone, with the weights in its memory."""

    def __init__(self, host: str, doing: str, cause: str) -> None:
        super().__init__(f"host {host} is gone ({cause}); it was to {doing}.")


class WeightsRemoved(NereusError):
    """Weights were let go of while somebody was to get them: published once more, perhaps."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"weights version {version} were removed while they were to be read; take them from "
            "where they have been published since."
        )


class Hosts(Protocol):
    """Memory of the hosts that devices are on. Thread-safe."""

    def reserve(self, device: Device, num_bytes: int) -> str:
        """Make a segment that a device's process can write to; it is held until `remove`.

        Raises:
            HostLost, WaitTimeout: the device's host is gone or does not answer.
        """
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Let go of segments, and of what was copied from them. Safe to repeat."""
        ...

    def holds(self, published: Published) -> bool:
        """Whether all of what was published is still there."""
        ...

    def deliver(self, published: Published, places: Iterable[Place]) -> None:
        """Bring weights to the hosts of engines, at once; what is there is not sent again.

        Raises:
            HostLost: a host is gone that was to send or to get a part; others may have theirs.
            WaitTimeout: one did not take its part in time.
            WeightsRemoved: they were let go of before, or meanwhile.
            NereusError: a host failed at it.
        """
        ...

    def manifest(self, published: Published, place: Place) -> Manifest:
        """Say what the ranks of an engine read on its host, delivered if it was not.

        Raises:
            HostLost, WaitTimeout, WeightsRemoved, NereusError: as `deliver`.
        """
        ...

    def check(self, published: Published, places: Sequence[Place]) -> None:
        """Check what engines at some places would read, brought there if it was not.

        Raises:
            GarbledWeights: it is not as published.
            HostLost, WaitTimeout, WeightsRemoved, NereusError: as `deliver`.
        """
        ...

    def read(self, pieces: Iterable[Piece]) -> Iterator[bytes | memoryview]:
        """Yield the bytes of pieces, each until the next is asked for.

        Raises:
            HostLost, WaitTimeout: its host is gone or does not answer.
            NereusError, FileNotFoundError: it was let go of; as its host, or this one, says it.
        """
        ...


class ThisHost:
    """All devices are of one host: what is written can be read. Implements `Hosts`."""

    def reserve(self, device: Device, num_bytes: int) -> str:
        """Make a segment, held by this process."""
        return reserve(num_bytes)

    def remove(self, names: Iterable[str]) -> None:
        """Let go of segments."""
        remove(names)

    def holds(self, published: Published) -> bool:
        """It is: this process holds it."""
        return True

    def deliver(self, published: Published, places: Iterable[Place]) -> None:
        """Do nothing: it is there."""

    def manifest(self, published: Published, place: Place) -> Manifest:
        """Say what the ranks of an engine read."""
        return published.manifest(place[0])

    def check(self, published: Published, places: Sequence[Place]) -> None:
        """Check all of it."""
        check(published.pieces, published.version)

    def read(self, pieces: Iterable[Piece]) -> Iterator[bytes | memoryview]:
        """Yield the bytes of pieces, mapped."""
        return (content for _, content in contents(pieces))


def check(pieces: Iterable[Piece], version: int) -> None:
    """Raise GarbledWeights when pieces in segments of this host are not what was published."""
    for piece, content in contents(pieces):
        piece.check(content, version)


def contents(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, memoryview]]:
    """Yield pieces in segments of this host with their bytes, each segment mapped once.

    Bytes are unmapped when the next piece is asked for: nobody may hold on to them.
    """
    segments: dict[str, Segment] = {}
    try:
        for piece in pieces:
            if piece.segment not in segments:
                segments[piece.segment] = Segment(piece.segment)
            with segments[piece.segment].view(piece.offset, piece.num_bytes) as content:
                yield piece, content
    finally:
        for segment in segments.values():
            segment.close()
