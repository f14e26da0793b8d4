"""Meetings: which group each host is in. A host leaves its group when it joins another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping

from nereus_adapters.rollout.memory import Meeting
from nereus_adapters.rollout.weight_hosts import WeightHost


class Meetings:
    """The groups of hosts, as the driver knows them. Thread-safe.

    What of a group is left where others went elsewhere is still a group: parties talk in pairs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._in: dict[str, tuple[Meeting, WeightHost]] = {}
        """Node -> its group, and the process that joined it."""

    def of(self, parties: Mapping[str, WeightHost]) -> Meeting | None:
        """Return the group that hosts are in together; None where they are in none."""
        with self._lock:
            found = [self._in.get(node) for node in parties]
        meetings = set()
        for joined, host in zip(found, parties.values(), strict=True):
            if joined is None or joined[1] is not host:
                return None
            meetings.add(joined[0])
        return meetings.pop() if len(meetings) == 1 else None

    def begin(
        self, parties: Mapping[str, WeightHost], address: tuple[str, int], timeout_s: float
    ) -> Meeting:
        """Put hosts into a new group."""
        with self._lock:
            meeting = Meeting(next(self._count), tuple(parties), address, timeout_s)
            self._in |= {node: (meeting, host) for node, host in parties.items()}
        return meeting

    def end(self, meeting: Meeting) -> None:
        """Use a group no more: a message did not get through."""
        with self._lock:
            ended = [node for node, (joined, _) in self._in.items() if joined == meeting]
            for node in ended:
                del self._in[node]
