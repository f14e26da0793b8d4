"""HostMemory: what a process does for the weights of its host, as `delivery` asks it to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nereus_adapters.rollout.hosts import check
from nereus_adapters.rollout.mirror import Party, Shipment
from nereus_adapters.rollout.port import free_port
from nereus_adapters.rollout.segment import Segment, remove, reserve
from nereus_adapters.rollout.weights import Piece


@dataclass(frozen=True, slots=True)
class Meeting:
    """A group of parties: one for each host."""

    number: int
    """Of the group; a group that lost a party or a message is never used again."""
    names: tuple[str, ...]
    address: tuple[str, int]
    """Where they meet; on the host of the first by name."""
    timeout_s: float
    """Longest wait for a party to come, and that parties may rest in an exchange."""


class HostMemory:
    """Segments that this process holds for its host, and its place in the group of hosts.

    Args:
        name: of the host.
        address: of the host, as others reach it.
    """

    def __init__(self, name: str, address: str) -> None:
        self._name, self._address = name, address
        self._lock = threading.Lock()
        self._met: tuple[int, Party] | None = None

    def reserve(self, num_bytes: int) -> str:
        """Make a segment."""
        return reserve(num_bytes)

    def remove(self, names: Iterable[str]) -> None:
        """Let go of segments."""
        remove(names)

    def meeting_place(self) -> tuple[str, int]:
        """Return an address on this host that nobody listens on."""
        return self._address, free_port(self._address)

    def exchange(self, meeting: Meeting, listed: Sequence[Shipment]) -> tuple[Piece, ...]:
        """Do this host's part of shipments; return what it received, in a segment of its own.

        Raises:
            WaitTimeout: names who did not come, send or take.
        """
        with self._lock:
            try:
                return self._party(meeting).exchange(listed)
            except BaseException:
                self._leave()
                raise

    def _party(self, meeting: Meeting) -> Party:
        if self._met is None or self._met[0] != meeting.number:
            self._leave()
            party = Party(self._name, meeting.names, meeting.address, timeout_s=meeting.timeout_s)
            self._met = (meeting.number, party)
        return self._met[1]

    def _leave(self) -> None:
        met, self._met = self._met, None
        if met is not None:
            met[1].close()

    def leave(self) -> None:
        """Leave the group of hosts, after an exchange that is under way."""
        with self._lock:
            self._leave()

    def check(self, pieces: Sequence[Piece], version: int) -> None:
        """Raise GarbledWeights when pieces on this host are not what was published."""
        check(pieces, version)

    def read(self, piece: Piece) -> bytes:
        """Return the bytes of a piece."""
        with Segment(piece.segment) as segment:
            return bytes(segment.view(piece.offset, piece.num_bytes))
