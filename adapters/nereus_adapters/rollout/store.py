"""Store: versions of the weights that engines hold or are to get, while somebody needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_adapters.rollout.hosts import Hosts, ThisHost
from nereus_adapters.rollout.segment import remove, reserve
from nereus_adapters.rollout.weights import Piece, Published, assign, cells_bytes, publish
from nereus_core.cluster import Device
from nereus_core.model import ModelSpec
from nereus_core.state import Box, Shard

ReadAt = Callable[[Device, str, Box], NDArray[np.generic]]
"""Gives a box of a tensor as a device of the trainer holds it."""


class Store:
    """Published weights by version. An engine that is built later starts from the version that its
    siblings serve, without asking the trainer: it is still here. Thread-safe.

    Args:
        hosts: whose memory they lie in.
    """  # noqa: D205  (two sentences that belong together)

    def __init__(self, hosts: Hosts | None = None) -> None:
        self.hosts: Hosts = ThisHost() if hosts is None else hosts
        self._lock = threading.Lock()
        self._published: dict[int, Published] = {}

    def add(self, published: Published) -> None:
        """Keep a version; one of the same number is replaced."""
        with self._lock:
            old = self._published.get(published.version)
            self._published[published.version] = published
        if old is not None:
            self.hosts.remove(old.segments - published.segments)

    def get(self, version: int) -> Published:
        """Return a version; raises KeyError for one that nobody has needed for a while."""
        with self._lock:
            return self._published[version]

    def __contains__(self, version: int) -> bool:
        with self._lock:
            return version in self._published

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions, and let go of their segments."""
        with self._lock:
            gone = [self._published.pop(v) for v in list(self._published) if v not in versions]
        for published in gone:
            self.hosts.remove(published.segments)

    def close(self) -> None:
        """Forget everything."""
        self.keep(())


def publish_here(
    model: ModelSpec,
    holders: Sequence[tuple[Device, Shard]],
    read: ReadAt,
    *,
    version: int,
    dtype: str,
    max_devices: int,
) -> Published:
    """Publish the weights of a trainer whose devices this process can read.

    A trainer with a process per device calls `weights.publish` in each of them instead.

    Raises:
        KeyError: a part of the model is held by no device.
    """
    pieces: list[Piece] = []
    names: list[str] = []
    try:
        for device, cells in assign(model, holders, max_devices).items():

            def at(tensor: str, box: Box, device: Device = device) -> NDArray[np.generic]:
                return read(device, tensor, box)

            names.append(reserve(cells_bytes(cells, dtype)))
            pieces += publish(names[-1], cells, at)
    except BaseException:
        remove(names)
        raise
    return Published(version, model, dtype, tuple(pieces))
