"""Weight synchronization on a seat: a unit's parameters are overwritten in place, no staging."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nereus_adapters.torch.accountant import Accountant
from nereus_adapters.torch.crossing import Crossing, Digests
from nereus_adapters.torch.engine import Group, UnitShard, make_group
from nereus_adapters.torch.transfer import reader
from nereus_adapters.torch.values import Offer, SyncPart, Ways
from nereus_core.state import Box, Slot
from nereus_core.units import UnitId

TORN = -1
"""Weight version of a unit whose synchronization did not end; nothing may be read from it."""


class Lane:
    """One seat's part in bringing a stage to the weights of another, again and again."""

    def __init__(
        self,
        part: SyncPart,
        units: Mapping[UnitId, UnitShard],
        device: torch.device,
        accountant: Accountant,
    ) -> None:
        self._part, self._units, self._device = part, units, device
        self._read = reader(units, part.sources, device)
        self._crossing = Crossing(
            part.rank, part.buckets, self._read, self._write, self._dtype, device, accountant
        )
        self._ways = Ways({}, frozenset(), None)
        self._group: Group | None = None

    def offer(self) -> Offer:
        """Say where other seats find the weights they need."""
        return self._crossing.offer()

    def join(self, ways: Ways, store: torch.distributed.Store, secret: bytes) -> None:
        """Learn how weights cross.

        Raises:
            Unreadable: a neighbor cannot be read.
            WaitTimeout: a member of the group did not come.
        """
        self.close()
        self._crossing.check_ways(ways)
        self._ways, meeting = ways, ways.meeting
        if meeting is not None:
            self._group = make_group(
                store,
                meeting.name,
                meeting.rank,
                meeting.size,
                self._device,
                meeting.timeout_s,
                secret,
            )

    def cross(self) -> Digests:
        """Overwrite the weights here, whose version is TORN then; return digests of what left."""
        self._mark(TORN)
        with torch.no_grad():
            for name, box in self._part.kept:
                self._write(Slot.PARAM, name, box).copy_(self._read(Slot.PARAM, name, box))
            return self._crossing.cross(self._ways, self._group)

    def accept(self, left: Digests, version: int) -> None:
        """Give the weights their version.

        Raises:
            Garbled: something arrived changed; the version stays TORN.
        """
        self._crossing.verify(left)
        self._mark(version)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _mark(self, version: int) -> None:
        if self._part.target is not None:
            self._units[self._part.target].counters["weight_version"] = version

    def _shard(self) -> UnitShard:
        assert self._part.target is not None
        return self._units[self._part.target]

    def _write(self, slot: Slot, name: str, box: Box) -> torch.Tensor:
        shard = self._shard()
        return shard.tensor(slot, name)[box.within(shard.box(name))]

    def _dtype(self, slot: Slot) -> torch.dtype:
        return self._shard().dtype(slot)
