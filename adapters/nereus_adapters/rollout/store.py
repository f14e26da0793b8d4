"""Store: versions of the weights that engines hold or are to get, while somebody needs them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_adapters.rollout.segment import PREFIX, Segment
from nereus_adapters.rollout.weights import Piece, Published, assign, publish
from nereus_core.cluster import Device
from nereus_core.model import ModelSpec
from nereus_core.state import Box, Shard

ReadAt = Callable[[Device, str, Box], NDArray[np.generic]]
"""Gives a box of a tensor as a device of the trainer holds it."""


class Store:
    """Published weights by version. An engine that is built later starts from the version that its
    siblings serve, without asking the trainer: it is still here. Thread-safe.
    """  # noqa: D205  (two sentences that belong together)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[int, Published] = {}
        self._segments: dict[int, tuple[Segment, ...]] = {}

    def add(self, published: Published, segments: Iterable[Segment]) -> None:
        """Keep a version; one of the same number is replaced."""
        with self._lock:
            old = self._segments.pop(published.version, ())
            self._published[published.version] = published
            self._segments[published.version] = tuple(segments)
        _drop(old)

    def get(self, version: int) -> Published:
        """Return a version; raises KeyError for one that nobody has needed for a while."""
        with self._lock:
            return self._published[version]

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions."""
        with self._lock:
            gone = [v for v in self._published if v not in versions]
            old = [segment for v in gone for segment in self._segments.pop(v)]
            for version in gone:
                del self._published[version]
        _drop(old)

    def close(self) -> None:
        """Forget everything."""
        self.keep(())


def _drop(segments: Iterable[Segment]) -> None:
    for segment in segments:
        segment.remove()
        segment.close()


def publish_here(
    model: ModelSpec,
    holders: Sequence[tuple[Device, Shard]],
    read: ReadAt,
    *,
    version: int,
    dtype: str,
    max_devices: int,
) -> tuple[Published, list[Segment]]:
    """Publish the weights of a trainer whose devices this process can read.

    A trainer with a process per device calls `weights.publish` in each of them instead.

    Raises:
        KeyError: a part of the model is held by no device.
    """
    segments: list[Segment] = []
    pieces: list[Piece] = []
    for device, cells in assign(model, holders, max_devices).items():
        name = segment_name(version)

        def at(tensor: str, box: Box, device: Device = device) -> NDArray[np.generic]:
            return read(device, tensor, box)

        segment, written = publish(name, cells, at)
        segments.append(segment)
        pieces += written
    return Published(version, model, dtype, tuple(pieces)), segments


def segment_name(version: int) -> str:
    """Return a name that nobody can guess and no segment has."""
    return f"{PREFIX}{version}-{secrets.token_hex(8)}"

