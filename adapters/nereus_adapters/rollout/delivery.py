"""Delivery: weights on several hosts, brought to those whose engines read them (`mirror`).

The driver says who sends what; the bytes go from host to host and never through it. Hosts form one
group, and a new one when a host has come or gone, or when a message did not get through.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, Protocol

from nereus_adapters.rollout.hosts import HostLost, Place
from nereus_adapters.rollout.memory import HostMemory, Meeting
from nereus_adapters.rollout.mirror import Shipment, shipments
from nereus_adapters.rollout.segment import held
from nereus_adapters.rollout.weights import Manifest, Piece, Published
from nereus_core.cluster import Device
from nereus_core.errors import WaitTimeout

DRIVER = "the driver"
"""Party of the driver's own process, where a trainer there publishes."""


class WeightHost(Protocol):
    """A process on a host that has a `HostMemory`."""

    def ask(self, method: str, /, *args: object) -> Future[Any]:
        """Run a method of its `HostMemory`; the future gets HostLost when it ends first."""
        ...


class WeightHosts(Protocol):
    """The hosts of a cluster."""

    def of(self, node: str) -> WeightHost:
        """Return the host of a node, started if it is not there.

        Raises:
            HostLost: there is no such node now.
        """
        ...

    def alive(self) -> Mapping[str, WeightHost]:
        """Return those that are there."""
        ...


class _Own:
    """The driver's process as a host."""

    def __init__(self, address: str) -> None:
        self._memory = HostMemory(DRIVER, address)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="nereus weights")

    def ask(self, method: str, /, *args: object) -> Future[Any]:
        return self._threads.submit(getattr(self._memory, method), *args)


class Delivery:
    """Implements `nereus_adapters.rollout.hosts.Hosts`.

    Args:
        hosts: of the cluster.
        address: of the driver's host.
        wait_s: longest wait for a host, a party or a message.
    """

    def __init__(self, hosts: WeightHosts, address: str, *, wait_s: float = 60.0) -> None:
        self._hosts, self._own, self._wait_s = hosts, _Own(address), wait_s
        self._lock = threading.RLock()
        self._at: dict[str, str] = {}
        """Segment -> host."""
        self._copies: dict[tuple[str, Piece], Piece] = {}
        """Host, piece as published -> as it lies there."""
        self._meeting: Meeting | None = None
        self._count = itertools.count()
        self.sent_bytes = 0
        """Between hosts, ever."""

    # --- Segments ---------------------------------------------------------------------------------

    def reserve(self, device: Device, num_bytes: int) -> str:
        """Make a segment on a device's host."""
        host = self._hosts.of(device.node)
        name: str = self._result(device.node, host.ask("reserve", num_bytes), "hold weights")
        with self._lock:
            self._at[name] = device.node
        return name

    def remove(self, names: Iterable[str]) -> None:
        """Let go of segments, and of copies of what lay in them."""
        with self._lock:
            gone = set(names)
            ended = [key for key in self._copies if key[1].segment in gone]
            copies = {self._copies.pop(key).segment for key in ended}
            gone |= copies - {piece.segment for piece in self._copies.values()}
            at = defaultdict(list)
            for name in gone:
                at[self._at.pop(name, DRIVER)].append(name)
        alive = {**self._hosts.alive(), DRIVER: self._own}
        for node, theirs in at.items():
            if node in alive:  # one that is gone holds nothing
                alive[node].ask("remove", theirs)

    def _where(self, published: Published) -> dict[str, str]:
        own = held()
        return {s: self._at[s] if s not in own else DRIVER for s in published.segments}

    def holds(self, published: Published) -> bool:
        """Whether the hosts of all its segments are there."""
        there = {*self._hosts.alive(), DRIVER}
        with self._lock:
            return there.issuperset(self._where(published).values())

    # --- Deliveries -------------------------------------------------------------------------------

    def deliver(self, published: Published, places: Iterable[Place]) -> None:
        """Send what is missing, all of it in one exchange."""
        wanted: dict[str, list[Any]] = defaultdict(list)
        for layout, device in places:
            wanted[device.node].append(layout)
        with self._lock:
            listed = []
            for shipment in shipments(published, self._where(published), wanted):
                pieces = [p for p in shipment.pieces if (shipment.target, p) not in self._copies]
                if pieces:
                    listed.append(replace(shipment, pieces=tuple(pieces)))
            if listed:
                self._exchange(listed)

    def _exchange(self, listed: Sequence[Shipment]) -> None:
        for node in {s.target for s in listed}:
            self._hosts.of(node)
        parties: dict[str, WeightHost] = dict(self._hosts.alive())
        if any(s.source == DRIVER for s in listed):
            parties[DRIVER] = self._own
        for source in {s.source for s in listed}:
            if source not in parties:
                raise HostLost(source, "send weights", "it has ended since it got them")
        meeting = self._met(parties)
        asked = {n: party.ask("exchange", meeting, listed) for n, party in parties.items()}
        first: Exception | None = None
        for node, future in asked.items():
            try:
                made = self._result(node, future, "exchange weights", 3 * self._wait_s)
            except Exception as error:
                first = error if first is None or isinstance(error, HostLost) else first
                continue
            coming = [(node, p) for s in listed if s.target == node for p in s.pieces]
            self._copies.update(zip(coming, made, strict=True))
            self._at.update({piece.segment: node for piece in made})
            self.sent_bytes += sum(piece.num_bytes for piece in made)
        if first is not None:
            self._meeting = None
            raise first

    def _met(self, parties: Mapping[str, WeightHost]) -> Meeting:
        """Return the group of all hosts: the last one, if they are the same."""
        names = tuple(sorted(parties))
        if self._meeting is None or self._meeting.names != names:
            place = self._result(names[0], parties[names[0]].ask("meeting_place"), "meet others")
            self._meeting = Meeting(next(self._count), names, place, self._wait_s)
        return self._meeting

    def manifest(self, published: Published, place: Place) -> Manifest:
        """Say what the ranks of an engine read on its host."""
        layout, device = place
        self.deliver(published, [place])
        manifest = published.manifest(layout)
        with self._lock:
            ranks = tuple(
                tuple(self._copies.get((device.node, piece), piece) for piece in rank)
                for rank in manifest.ranks
            )
        return replace(manifest, ranks=ranks)

    def check(self, published: Published, places: Sequence[Place]) -> None:
        """Let hosts check what engines would read there."""
        asked = []
        for place in places:
            pieces = {p for rank in self.manifest(published, place).ranks for p in rank}
            host = self._hosts.of(place[1].node)
            asked.append((place[1].node, host.ask("check", list(pieces), published.version)))
        for node, future in asked:
            self._result(node, future, "check weights")

    def read(self, piece: Piece) -> bytes:
        """Fetch the bytes of a piece."""
        with self._lock:
            node = self._at.get(piece.segment, DRIVER)
        host = self._own if node == DRIVER else self._hosts.of(node)
        found: bytes = self._result(node, host.ask("read", piece), "read weights")
        return found

    def _result(
        self, node: str, future: Future[Any], doing: str, wait_s: float | None = None
    ) -> Any:
        wait_s = self._wait_s if wait_s is None else wait_s
        try:
            return future.result(wait_s)
        except FutureTimeout:
            raise WaitTimeout(f"host {node} to {doing}", wait_s) from None
