"""Transfer: a seat's side of one primitive: prepare, transfer, verify, commit, release.

The new shard comes to stand beside the old one. What the seat holds already is not sent: an
unchanged box is adopted, a box that is partly there is assembled at commit, tensor by tensor, and
only its missing parts are staged. So a seat never holds two whole copies of what it keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from nereus_adapters.torch.accountant import Accountant
from nereus_adapters.torch.crossing import Crossing, Digests
from nereus_adapters.torch.engine import Group, UnitShard, make_group
from nereus_adapters.torch.exchange import Locate, Spoils
from nereus_adapters.torch.shells import Shells
from nereus_adapters.torch.values import Offer, Region, SeatPart, Ways
from nereus_core.state import Box, Slot
from nereus_core.units import UnitId

Key = tuple[Slot, str]
_HOST = torch.device("cpu")


class Transfer:
    """One primitive on one seat. `commit` is the point of no return; until then, `abandon`."""

    def __init__(
        self,
        part: SeatPart,
        units: Mapping[UnitId, UnitShard],
        device: torch.device,
        accountant: Accountant,
        shells: Shells,
    ) -> None:
        self.part = part
        self._units, self._device, self._accountant = units, device, accountant
        self._shells = shells
        self._new: UnitShard | None = None
        self._fresh: dict[Key, torch.Tensor] = {}
        self._patches: dict[Key, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        self._adopted: set[str] = set()
        self._staged_bytes = 0
        self._in_host: set[int] = set()
        """Identities of staged tensors that wait in host memory."""
        self._done: set[str] = set()
        self._group: Group | None = None
        self._read = reader(units, part.sources, device)
        self._crossing = Crossing(
            part.rank, part.buckets, self._read, self._write, self._dtype, device, accountant
        )

    def prepare(self) -> Offer:
        """Build the new shard's modules and the storage of what will arrive.

        Returns:
            Where other seats find what they need of this one.
        """
        self._build()
        offer = self._crossing.offer()
        self._crossing.digest_ahead()
        return offer

    def _build(self) -> None:
        if self.part.spec is None:
            return
        self._new = self._shells.build(self.part.spec)
        fetched = _by_name(self.part.fetched)
        for name in self._new.names:
            box = self._new.box(name)
            old = self._ending_shard(name)
            for slot in self.part.slots:
                dtype = self._new.dtype(slot)
                if old is None or box.intersect(old.box(name)) is None:
                    self._fresh[slot, name] = self._staged(box, dtype)
                elif old.box(name) == box:
                    self._adopted.add(name)
                else:
                    self._patches[slot, name] = [(b, self._staged(b, dtype)) for b in fetched[name]]

    def _staged(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Make storage for what will arrive: on the device up to the limit, then in host memory."""
        size, limit = box.num_elements * dtype.itemsize, self.part.staging_bytes
        if limit is None or self._staged_bytes + size <= limit:
            self._staged_bytes += size
            return self._accountant.empty(box.shape, dtype, self._device)
        tensor = self._accountant.storage(box.shape, dtype, _HOST)
        self._in_host.add(id(tensor))
        return tensor

    def _drop_staged(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._in_host:
            self._in_host.discard(id(tensor))
        else:
            self._accountant.drop(tensor.nbytes)

    def meet(self, ways: Ways, store: torch.distributed.Store, secret: bytes) -> None:
        """Look whether neighbors can be read; join the group of those that exchange messages.

        Raises:
            Unreadable: a neighbor cannot be read; nothing has moved.
            WaitTimeout: a member of the group did not come.
        """
        self._leave()
        self._crossing.check_ways(ways)
        meeting = ways.meeting
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

    def transfer(self, ways: Ways, spoils: Spoils = lambda: False) -> Digests:
        """Copy what lies on this seat in a unit that stays; get the rest from other seats.

        Returns:
            Digests of what others read here.
        """
        with torch.no_grad():
            for name, box in self.part.kept:
                for slot in self.part.slots:
                    if (slot, name) in self._fresh:
                        self._write(slot, name, box).copy_(self._read(slot, name, box))
            return self._crossing.cross(ways, self._group, spoils)

    def verify(self, left: Digests) -> None:
        """Raise Garbled when something arrived changed."""
        self._crossing.verify(left)

    def commit(self) -> UnitShard | None:
        """Give the new shard its storage, taking it from the old shards; these are empty then.

        May be called again when it raised: it goes on where it stopped.
        """
        new, wanted = self._new, self._patched_names()
        for unit in self.part.ending:
            shard = self._units[unit]
            for name in shard.names:
                if name not in wanted and name not in self._adopted:
                    self._forget(shard, name)
        if new is None:
            return None
        with torch.no_grad():
            for name in new.names:
                if name not in self._done:
                    new.replace(self._assembled(new, name))
                    self._done.add(name)
        self._fresh.clear()
        new.counters.update(self.part.counters)
        for unit in self.part.ending:
            # Slots that the new shard does not have.
            for name in self._units[unit].names:
                self._forget(self._units[unit], name)
        return new

    def _assembled(self, new: UnitShard, name: str) -> dict[Key, torch.Tensor]:
        box, old = new.box(name), self._ending_shard(name)
        found: dict[Key, torch.Tensor] = {}
        for slot in self.part.slots:
            if (slot, name) in self._fresh:
                fresh = self._fresh.pop((slot, name))
                if id(fresh) in self._in_host:
                    staged = fresh
                    fresh = self._accountant.empty(staged.shape, staged.dtype, self._device)
                    fresh.copy_(staged)
                    self._drop_staged(staged)
                found[slot, name] = fresh
                continue
            assert old is not None
            if name in self._adopted:
                found[slot, name] = old.tensor(slot, name)
                old.blank(slot, name)
                continue
            whole = self._accountant.empty(box.shape, new.dtype(slot), self._device)
            common = box.intersect(old.box(name))
            assert common is not None
            whole[common.within(box)] = old.tensor(slot, name)[common.within(old.box(name))]
            for patch, tensor in self._patches[slot, name]:
                whole[patch.within(box)] = tensor
                self._drop_staged(tensor)
            del self._patches[slot, name]
            self._accountant.drop(old.tensor(slot, name).nbytes)
            old.blank(slot, name)
            found[slot, name] = whole
        return found

    def abandon(self) -> None:
        """Drop what was staged; the units are as they were."""
        for tensor in self._fresh.values():
            self._drop_staged(tensor)
        for patches in self._patches.values():
            for _, tensor in patches:
                self._drop_staged(tensor)
        self._fresh.clear()
        self._patches.clear()
        self._new = None
        self.release()

    def release(self) -> None:
        """Give up the transfer group; peers that still wait on it fail at once."""
        self._leave()
        self._crossing.forget()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    # --- Where a region lies ------------------------------------------------------------------

    def _write(self, slot: Slot, name: str, box: Box) -> torch.Tensor:
        assert self._new is not None
        if (fresh := self._fresh.get((slot, name))) is not None:
            whole = self._new.box(name)
            return fresh if box == whole else fresh[box.within(whole)]
        for patch, tensor in self._patches[slot, name]:
            if patch.intersect(box) == box:
                return tensor[box.within(patch)]
        raise KeyError(f"{slot}/{name} at {box.offset} was not expected here")

    def _dtype(self, slot: Slot) -> torch.dtype:
        assert self._new is not None
        return self._new.dtype(slot)

    def _ending_shard(self, name: str) -> UnitShard | None:
        for unit in self.part.ending:
            if self._units[unit].holds(name):
                return self._units[unit]
        return None

    def _patched_names(self) -> set[str]:
        return {name for _, name in self._patches}

    def _forget(self, shard: UnitShard, name: str) -> None:
        for slot in shard.slots:
            tensor = shard.tensor(slot, name)
            if not tensor.is_meta:
                self._accountant.drop(tensor.nbytes)
                shard.blank(slot, name)


def reader(
    units: Mapping[UnitId, UnitShard], sources: tuple[UnitId, ...], device: torch.device
) -> Locate:
    """Return a function that finds a region in the storage of the first source that has it.

    A view, except of a parked unit on an accelerator: its region comes from host memory.
    """

    def read(slot: Slot, name: str, box: Box) -> torch.Tensor:
        for unit in sources:
            shard = units[unit]
            if slot in shard.slots and shard.holds(name):
                held = shard.box(name)
                if box == held:  # the most frequent by far: no view is made
                    return shard.tensor(slot, name).to(device)
                if held.intersect(box) == box:
                    return shard.tensor(slot, name)[box.within(held)].to(device)
        raise KeyError(f"{slot}/{name} at {box.offset} is not held here")

    return read


def _by_name(regions: tuple[Region, ...]) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = defaultdict(list)
    for name, box in regions:
        found[name].append(box)
    return found
