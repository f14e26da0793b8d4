"""A cluster in memory: devices that hold real arrays, links that take time, and faults.

State really lives in shards and really moves: a `Store` is what one device holds of one unit, one
array per slot and box, and `World.carry` copies boxes from store to store along routes. Memory is
counted in the bytes of those arrays.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_core.cluster import Cluster, Device
from nereus_core.errors import OutOfDeviceMemory, SeatDead
from nereus_core.sim.clock import Clock
from nereus_core.state import Route, Shard, Slot

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Store:
    """What one device holds of one unit."""

    device: Device
    shard: Shard
    arrays: Mapping[tuple[Slot, str], Array]
    """By slot and logical tensor; each array has the shape of its box."""

    @classmethod
    def empty(cls, device: Device, shard: Shard, slots: Iterable[Slot], dtype: str) -> Store:
        """Make storage full of NaN, so that a part no route covers cannot pass for state."""
        arrays = {
            (slot, name): np.full(box.shape, np.nan, dtype)
            for slot in slots
            for name, box in shard.items()
        }
        return cls(device, shard, arrays)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())

    def holes(self) -> tuple[str, ...]:
        """Name the tensors with elements that were never written."""
        return tuple(
            f"{slot}/{name}" for (slot, name), a in self.arrays.items() if np.isnan(a).any()
        )


@dataclass(frozen=True, slots=True)
class Seal:
    """A part as it was sent, to be compared with what has arrived."""

    store: Store
    slot: Slot
    tensor: str
    place: tuple[slice, ...]
    checksum: int

    def broken(self) -> str | None:
        """Name the part when what has arrived is not what was sent."""
        arrived = self.store.arrays[self.slot, self.tensor][self.place]
        same = _checksum(arrived) == self.checksum
        return None if same else f"{self.slot}/{self.tensor} on {self.store.device}"


def _checksum(part: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(part).tobytes())


@dataclass(frozen=True, slots=True)
class Carried:
    """What one set of routes moved."""

    moved_bytes: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
    """By the links: the busiest device's bytes over its bandwidth, plus a latency per message."""
    seals: tuple[Seal, ...] = ()

    def __add__(self, other: Carried) -> Carried:
        return Carried(
            self.moved_bytes + other.moved_bytes,
            self.kept_bytes + other.kept_bytes,
            self.seconds + other.seconds,
            self.seals + other.seals,
        )


class World:
    """Capacity, residents and health of every device. Thread-safe."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.clock = clock
        self._cluster = cluster
        self._resident: dict[Device, dict[object, int]] = defaultdict(dict)
        self._peak: dict[Device, int] = defaultdict(int)
        self._draining: frozenset[Device] = frozenset()
        self._lock = threading.RLock()
        self._faults: list[tuple[Callable[[str], bool], Callable[[], None]]] = []
        self._corrupt: set[object] = set()

    # --- Health -------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """The cluster, with failed devices marked."""
        return self._cluster

    @property
    def draining(self) -> frozenset[Device]:
        """Healthy devices announced to leave."""
        return self._draining - self._cluster.failed

    def fail(self, device: Device) -> None:
        """Lose a device and all that lies on it."""
        with self._lock:
            self._cluster = self._cluster.without([device])
            self._resident.pop(device, None)

    def drain(self, devices: Iterable[Device]) -> None:
        """Announce that devices will leave soon."""
        with self._lock:
            self._draining |= frozenset(devices)

    def give_back(self, device: Device) -> None:
        """Return a device, empty and healthy."""
        with self._lock:
            self._cluster = self._cluster.with_back([device])
            self._draining -= {device}

    def alive(self, devices: Iterable[Device], doing: str) -> None:
        """Raise SeatDead for the first device that has failed."""
        for device in devices:
            if device in self._cluster.failed:
                raise SeatDead(device, None, doing)

    # --- Memory -------------------------------------------------------------------------------

    def reserve(self, holder: object, needs: Mapping[Device, int], what: str) -> None:
        """Take memory on several devices, on all or on none.

        Raises:
            OutOfDeviceMemory: a device has not that much left; nothing was taken.
        """
        with self._lock:
            for device, need in sorted(needs.items()):
                left = self._cluster.device_spec.memory_bytes - self.used_bytes(device)
                if need > left:
                    raise OutOfDeviceMemory(what, device, need, left)
            for device, need in needs.items():
                self._resident[device][holder] = self._resident[device].get(holder, 0) + need
                self._peak[device] = max(self._peak[device], self.used_bytes(device))

    def release(self, holder: object) -> None:
        """Free everything a holder has."""
        with self._lock:
            for residents in self._resident.values():
                residents.pop(holder, None)

    def held_bytes(self, holder: object) -> dict[Device, int]:
        """Bytes that a holder has taken, by device."""
        with self._lock:
            return {d: r[holder] for d, r in self._resident.items() if holder in r}

    def used_bytes(self, device: Device) -> int:
        """Bytes taken on a device now."""
        with self._lock:
            return sum(self._resident[device].values())

    def take_peaks(self, transient: Mapping[Device, int]) -> Mapping[Device, int]:
        """Return the most bytes taken on each device since the last call, and start anew.

        Args:
            transient: bytes that a running stage needs on top for a moment, by device.
        """
        with self._lock:
            peaks = {
                d: max(self._peak[d], self.used_bytes(d) + transient.get(d, 0))
                for d in self._cluster.healthy
            }
            self._peak.clear()
            return peaks

    # --- Faults -------------------------------------------------------------------------------

    def inject(self, when: Callable[[str], bool], then: Callable[[], None]) -> None:
        """Run ``then`` once, at the first moment whose name satisfies ``when``.

        Moments are named by what is about to happen: ``carry TENSOR SOURCE -> TARGET``. ``then``
        may fail devices or raise.
        """
        with self._lock:
            self._faults.append((when, then))

    def moment(self, name: str) -> None:
        """Pass a moment at which a fault may be waiting."""
        with self._lock:
            due = [fault for fault in self._faults if fault[0](name)]
            self._faults = [fault for fault in self._faults if fault not in due]
        for _, then in due:
            then()

    def corrupt(self, name: object) -> None:
        """Let what is carried under this name arrive changed."""
        self._corrupt.add(name)

    def spoil(self, name: object, seals: Sequence[Seal]) -> None:
        """Change what has arrived under a name, where `corrupt` says so."""
        if name in self._corrupt and seals:
            self._corrupt.remove(name)
            seals[0].store.arrays[seals[0].slot, seals[0].tensor][seals[0].place] += 1

    # --- Links --------------------------------------------------------------------------------

    def carry(
        self,
        routes: Iterable[Route],
        slots: Iterable[Slot],
        sources: Mapping[Device, Store],
        targets: Mapping[Device, Store],
    ) -> Carried:
        """Copy boxes from store to store, sealed; each slot takes the same routes.

        Raises:
            SeatDead: an end of a route has failed.
        """
        moved = kept = 0
        through: dict[Device, int] = defaultdict(int)
        messages: dict[Device, int] = defaultdict(int)
        ordered, seals = tuple(slots), list[Seal]()
        for route in routes:
            self.moment(f"carry {route.tensor} {route.source} -> {route.target}")
            self.alive((route.source, route.target), f"the transfer of {route.tensor}")
            source, target = sources[route.source], targets[route.target]
            inside = route.box.within(source.shard[route.tensor])
            place = route.box.within(target.shard[route.tensor])
            for slot in ordered:
                part = source.arrays[slot, route.tensor][inside]
                seals.append(Seal(target, slot, route.tensor, place, _checksum(part)))
                target.arrays[slot, route.tensor][place] = part
                if route.is_local:
                    kept += part.nbytes
                else:
                    moved += part.nbytes
                    for end in (route.source, route.target):
                        through[end] += part.nbytes
                        messages[end] += 1
        link = self._cluster.link(sources.keys() | targets.keys())
        seconds = max(
            (n / link.bytes_per_s + messages[d] * link.latency_s for d, n in through.items()),
            default=0.0,
        )
        self.clock.spend(seconds)
        return Carried(moved, kept, seconds, tuple(seals))
