"""Delivery: weights on several hosts, brought to those whose engines read them (`mirror`).

The driver says who sends what; the bytes go from host to host and never through it. Hosts that send
or receive form a group, kept while it has all that are needed; there is a new one when a host has
come or gone, or when a message did not get through. A host is in one group and one exchange at a
time; exchanges that share no host run side by side (`turns`, `meetings`).

A host that ends takes its memory with it. Another may come in its place, under the same name: so a
segment is known by the host object that holds it, never by the name of a node alone.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

from nereus_adapters.rollout.hosts import HostLost, Place, WeightsRemoved
from nereus_adapters.rollout.meetings import Meetings
from nereus_adapters.rollout.memory import Meeting
from nereus_adapters.rollout.mirror import Shipment, longest_s, shipments
from nereus_adapters.rollout.segment import held
from nereus_adapters.rollout.segment import remove as let_go
from nereus_adapters.rollout.turns import Turns
from nereus_adapters.rollout.weight_hosts import DRIVER, Home, OwnHost, WeightHost, WeightHosts
from nereus_adapters.rollout.weights import Manifest, Piece, Published
from nereus_core.cluster import Device
from nereus_core.errors import WaitTimeout
from nereus_core.layout import Layout


class Delivery:
    """Implements `nereus_adapters.rollout.hosts.Hosts`.

    Args:
        hosts: of the cluster.
        address: of the driver's host.
        wait_s: longest wait for a host or a party, and that parties may rest in an exchange.
    """

    def __init__(self, hosts: WeightHosts, address: str, *, wait_s: float = 60.0) -> None:
        self._hosts, self._own, self._wait_s = hosts, OwnHost(address), wait_s
        self._lock = threading.Lock()
        """Of what is known; never held while a host is waited for."""
        self._turns = Turns()
        self._at: dict[str, Home] = {}
        """Segment -> whose it is; those of the driver's process are not here."""
        self._copies: dict[tuple[str, Piece], Piece] = {}
        """Node, piece as published -> as it lies there, if its segment's host is still there."""
        self._meetings = Meetings()
        self.sent_bytes = 0
        """Between hosts, ever."""

    def close(self) -> None:
        """Let go of the driver's part in groups; hosts end by themselves. Safe to call twice."""
        self._own.close()

    # --- Segments ---------------------------------------------------------------------------------

    def reserve(self, device: Device, num_bytes: int) -> str:
        """Make a segment on a device's host."""
        home = Home(device.node, self._hosts.of(device.node))
        name: str = self._result(
            home,
            home.host.ask("reserve", num_bytes),
            "hold weights",
            late=lambda made: self._let_go(home, [made]),
        )
        with self._lock:
            self._at[name] = home
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
                if (home := self._at.pop(name, None)) is not None:
                    at[home].append(name)
            let_go(gone)  # those of this process
        there = self._there()
        for home, theirs in at.items():
            if there.get(home.node) is home.host:  # one that is gone holds nothing
                home.host.ask("remove", theirs)

    def _there(self) -> dict[str, WeightHost]:
        return {**self._hosts.alive(), DRIVER: self._own}

    def _let_go(self, home: Home, names: Sequence[str]) -> None:
        """Remove what a host made after it was waited for; from a thread that must not wait."""
        threading.Thread(target=home.host.ask, args=("remove", names), daemon=True).start()

    def _where(self, published: Published) -> dict[str, Home]:
        """Return whose its segments are; raises WeightsRemoved. `_lock` is held."""
        found = {}
        for segment in published.segments:
            if (home := self._home(segment)) is None:
                raise WeightsRemoved(published.version)
            found[segment] = home
        return found

    def _home(self, segment: str) -> Home | None:
        """Return whose a segment is; None for one that was removed. `_lock` is held."""
        return Home(DRIVER, self._own) if segment in held() else self._at.get(segment)

    def holds(self, published: Published) -> bool:
        """Whether the hosts that have its segments are there: these, not others in their place."""
        there = self._there()
        try:
            with self._lock:
                homes = self._where(published).values()
        except WeightsRemoved:
            return False
        return all(there.get(home.node) is home.host for home in homes)

    # --- Deliveries -------------------------------------------------------------------------------

    def deliver(self, published: Published, places: Iterable[Place]) -> None:
        """Send what is missing, all of it in one exchange, when its hosts have no other."""
        wanted: dict[str, list[Layout]] = defaultdict(list)
        for layout, device in places:
            wanted[device.node].append(layout)
        for node in wanted:
            self._hosts.of(node)
        while listed := self._missing(published, wanted):
            parties = _parties(listed)
            with self._turns.take(parties, self._wait_s + self._longest_s(listed)):
                # Others have sent some of it meanwhile, perhaps.
                if not (listed := self._missing(published, wanted)):
                    return
                if not _parties(listed) <= parties:  # a host has gone that had a part
                    continue
                try:
                    self._exchange(listed)
                except Exception:
                    with self._lock:
                        self._where(published)  # were they removed, that is why
                    raise
                return

    def _missing(
        self, published: Published, wanted: Mapping[str, Sequence[Layout]]
    ) -> list[Shipment]:
        """Say who is to send what that is not there; raises HostLost, WeightsRemoved."""
        there = self._there()
        with self._lock:
            homes = self._where(published)
            at = {segment: home.node for segment, home in homes.items()}
            listed = []
            for shipment in shipments(published, at, wanted):
                missing = tuple(
                    p for p in shipment.pieces if self._copy(shipment.target, p, there) is None
                )
                if missing:
                    listed.append(replace(shipment, pieces=missing))
        for home in {homes[piece.segment] for s in listed for piece in s.pieces}:
            if there.get(home.node) is not home.host:
                raise HostLost(home.node, "send weights", "it has ended since it got them")
        return listed

    def _longest_s(self, listed: Sequence[Shipment]) -> float:
        """Return the longest that an exchange takes: parties come, and send; all say so."""
        num_bytes = sum(shipment.num_bytes for shipment in listed)
        return 2 * self._wait_s + longest_s(num_bytes, self._wait_s)

    def _copy(self, node: str, piece: Piece, there: Mapping[str, WeightHost]) -> Piece | None:
        """Return a piece as it lies on a host now, where it was sent there. `_lock` is held."""
        copy = self._copies.get((node, piece))
        home = None if copy is None else self._at.get(copy.segment)
        return copy if home is not None and there.get(home.node) is home.host else None

    def _exchange(self, listed: Sequence[Shipment]) -> None:
        """Have parties that are held do shipments."""
        there, parties = self._there(), dict[str, WeightHost]()
        for node in sorted(_parties(listed)):
            if node not in there:
                raise HostLost(node, "exchange weights", "it has ended")
            parties[node] = there[node]
        meeting = self._meeting(parties)
        asked = {n: party.ask("exchange", meeting, listed) for n, party in parties.items()}
        wait_s = self._longest_s(listed)
        deadline_s = time.monotonic() + wait_s
        first: Exception | None = None
        for node, future in asked.items():
            home = Home(node, parties[node])

            def late(made: Sequence[Piece], home: Home = home) -> None:
                self._let_go(home, sorted({piece.segment for piece in made}))

            try:
                left_s = max(0.0, deadline_s - time.monotonic())
                made = self._result(home, future, "exchange weights", left_s, late)
            except Exception as error:
                if first is None:  # what the others wait for will not come: they rest no longer
                    deadline_s = min(deadline_s, time.monotonic() + self._wait_s)
                first = error if first is None or isinstance(error, HostLost) else first
                continue
            self._came(home, [p for s in listed if s.target == node for p in s.pieces], made)
        if first is not None:
            self._meetings.end(meeting)
            raise first

    def _came(self, home: Home, sent: Sequence[Piece], made: Sequence[Piece]) -> None:
        """Take note of copies; those of segments that were removed meanwhile go too."""
        with self._lock:
            pairs = zip(sent, made, strict=True)
            wanted = [(p, copy) for p, copy in pairs if self._home(p.segment) is not None]
            self._copies.update({(home.node, piece): copy for piece, copy in wanted})
            self._at.update({copy.segment: home for _, copy in wanted})
            self.sent_bytes += sum(piece.num_bytes for piece in made)
        if unwanted := {p.segment for p in made} - {copy.segment for _, copy in wanted}:
            home.host.ask("remove", sorted(unwanted))

    def _meeting(self, parties: Mapping[str, WeightHost]) -> Meeting:
        """Return a group of hosts, or what is needed to form one."""
        if (meeting := self._meetings.of(parties)) is not None:
            return meeting
        first = Home(*next(iter(parties.items())))
        place = self._result(first, first.host.ask("meeting_place"), "meet others")
        return self._meetings.begin(parties, place, self._wait_s)

    def manifest(self, published: Published, place: Place) -> Manifest:
        """Say what the ranks of an engine read on its host."""
        layout, device = place
        self.deliver(published, [place])
        manifest, there = published.manifest(layout), self._there()
        with self._lock:
            at = self._where(published)

            def read(piece: Piece) -> Piece:
                home = at[piece.segment]
                if home.node == device.node and there.get(home.node) is home.host:
                    return piece
                if (copy := self._copy(device.node, piece, there)) is None:
                    raise HostLost(device.node, "hold weights", "it has ended since it got them")
                return copy

            ranks = tuple(tuple(read(piece) for piece in rank) for rank in manifest.ranks)
        return replace(manifest, ranks=ranks)

    def check(self, published: Published, places: Sequence[Place]) -> None:
        """Let hosts check what engines would read there."""
        asked = []
        for place in places:
            pieces = {p for rank in self.manifest(published, place).ranks for p in rank}
            home = Home(place[1].node, self._hosts.of(place[1].node))
            asked.append((home, home.host.ask("check", list(pieces), published.version)))
        for home, future in asked:
            self._result(home, future, "check weights")

    def read(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """Fetch the bytes of pieces, one after another."""
        for piece in pieces:
            with self._lock:
                home = self._at.get(piece.segment, Home(DRIVER, self._own))
            yield self._result(home, home.host.ask("read", piece), "read weights")

    def _result(
        self,
        home: Home,
        future: Future[Any],
        doing: str,
        wait_s: float | None = None,
        late: Callable[[Any], None] | None = None,
    ) -> Any:
        """Wait for a host; what it makes after that goes to `late`."""
        wait_s = self._wait_s if wait_s is None else wait_s
        try:
            return future.result(wait_s)
        except FutureTimeout:

            def came(done: Future[Any]) -> None:
                if not done.cancelled() and done.exception() is None and late is not None:
                    late(done.result())

            future.add_done_callback(came)
            raise WaitTimeout(f"host {home.node} to {doing}", wait_s) from None


def _parties(listed: Iterable[Shipment]) -> set[str]:
    return {node for shipment in listed for node in (shipment.source, shipment.target)}
