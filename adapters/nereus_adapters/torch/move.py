"""Move: the driver's side of one primitive: who takes part, the phases, and the way back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nereus_adapters.torch.channel import Pending
from nereus_adapters.torch.crossing import Digests
from nereus_adapters.torch.fleet import Fleet
from nereus_adapters.torch.reading import Unreadable
from nereus_adapters.torch.routing import buckets, ranks
from nereus_adapters.torch.values import Bucket, Memory, Offer, SeatPart
from nereus_adapters.torch.ways import turned, ways
from nereus_core.cluster import Device
from nereus_core.errors import SeatDead, UnitLost, WaitTimeout
from nereus_core.phases import Enter, Phase
from nereus_core.state import Route, Slot, placed, routes
from nereus_core.units import Unit

_attempts = itertools.count()
"""Makes the names of groups and transfers unique: an op may be tried again after it failed."""


@dataclass(frozen=True, slots=True)
class Move:
    """State on its way from units to units."""

    name: str
    sources: tuple[Unit, ...]
    ending: tuple[Unit, ...]
    created: tuple[Unit, ...]
    routes: tuple[Route, ...]
    item_bytes: Mapping[Slot, int]
    """Slots that move, with the bytes of one element."""
    staging_bytes: int | None = None
    """As of a Split or Merge."""

    @classmethod
    def plan(
        cls,
        name: str,
        sources: tuple[Unit, ...],
        ending: tuple[Unit, ...],
        created: tuple[Unit, ...],
        item_bytes: Mapping[Slot, int],
        fleet: Fleet,
        staging_bytes: int | None = None,
    ) -> Move:
        """Find the routes; raises KeyError when a part is held by no source."""
        model = fleet.sources[created[0].model_stage.model].spec
        before = [pair for u in sources for pair in placed(model, u.layout, u.devices)]
        after = [pair for u in created for pair in placed(model, u.layout, u.devices)]
        return cls(name, sources, ending, created, routes(before, after), item_bytes, staging_bytes)

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross between devices."""
        return self._bytes(local=False)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay on their device."""
        return self._bytes(local=True)

    def _bytes(self, *, local: bool) -> int:
        elements = sum(r.box.num_elements for r in self.routes if r.is_local is local)
        return elements * sum(self.item_bytes.values())

    def fetched_bytes(self) -> dict[Device, int]:
        """Bytes per device that are staged beside what it holds."""
        ending = {d for u in self.ending for d in u.devices}
        found: dict[Device, int] = {}
        for route in self.routes:
            # Parts of a unit that ends are taken over; of one that stays, copied.
            if not (route.is_local and route.target in ending):
                size = route.box.num_elements * sum(self.item_bytes.values())
                found[route.target] = found.get(route.target, 0) + size
        if self.staging_bytes is not None:
            found = {device: min(size, self.staging_bytes) for device, size in found.items()}
        return found

    def run(
        self,
        fleet: Fleet,
        counters: Mapping[str, int | float],
        bucket_bytes: int,
        timeout_s: float,
        enter: Enter,
    ) -> dict[Device, int]:
        """Prepare (which the caller has entered), transfer, verify, commit, release.

        Returns:
            Peak state bytes per device that took part.

        Raises:
            UnitLost: a seat died or hung; before commit, everything else is as it was.
            Exception: what a seat raised before commit; all units are as they were.
        """
        op = f"{self.name}/{next(_attempts)}"
        numbering = ranks(self.routes)
        messages = buckets(self.routes, self.item_bytes, numbering, bucket_bytes)
        parts = self._parts(fleet, op, counters, numbering, messages)
        try:
            prepare: dict[Device, Mapping[str, Any]] = {d: {"part": p} for d, p in parts.items()}
            offers: dict[Device, Offer] = self._ask(fleet, "prepare", prepare, timeout_s)
            enter(Phase.TRANSFER)
            left = self._cross(fleet, op, offers, numbering, messages, timeout_s)
            enter(Phase.VERIFY)
            expected = turned(left, numbering)
            verify = {d: {"op": op, "left": expected.get(d, {})} for d in parts}
            self._ask(fleet, "verify", verify, timeout_s)
            enter(Phase.COMMIT)
        except BaseException as error:
            self._abandon(fleet, parts, op, timeout_s)
            if lost := self._lost(fleet, parts):
                raise UnitLost([u.id for u in lost], tuple(fleet.units), str(error)) from error
            raise
        peaks = self._commit(fleet, parts, op, timeout_s)
        alive = fleet.pool.alive
        standing = [u for u in self.created if alive.issuperset(u.devices)]
        gone = [u for u in self.created if u not in standing]
        fleet.replace((u.id for u in self.ending), standing)
        lost_too = self._lost(fleet, parts)
        enter(Phase.RELEASE)
        for unit in gone:
            fleet.drop(unit)
        # A seat that ends now takes units with it, but the primitive is done: whoever looks next
        # finds them gone.
        with suppress(SeatDead, WaitTimeout):
            self._ask(fleet, "release", {d: {"op": op} for d in parts if d in alive}, timeout_s)
        if gone or lost_too:
            lost_ids = sorted({u.id for u in (*gone, *lost_too)})
            raise UnitLost(lost_ids, tuple(fleet.units), f"a seat ended in commit of {self.name}")
        return peaks

    def _cross(
        self,
        fleet: Fleet,
        op: str,
        offers: Mapping[Device, Offer],
        numbering: Mapping[Device, int],
        messages: tuple[Bucket, ...],
        timeout_s: float,
    ) -> dict[Device, Digests]:
        """Let state cross; return the digests of what left each seat."""

        def attempt() -> dict[Device, Digests]:
            name = f"{op}/{'near' if fleet.may_read else 'far'}"
            chosen = ways(offers, numbering, messages, name, timeout_s, may_read=fleet.may_read)
            calls = {d: {"op": op, "ways": way} for d, way in chosen.items()}
            return self._ask(fleet, "transfer", calls, timeout_s)

        try:
            return attempt()
        except Unreadable:
            fleet.may_read = False
            return attempt()

    def _ask(
        self,
        fleet: Fleet,
        phase: str,
        calls: Mapping[Device, Mapping[str, Any]],
        timeout_s: float,
    ) -> dict[Device, Any]:
        pending = fleet.pool.send({d: (phase, kwargs) for d, kwargs in calls.items()})
        answers = fleet.settle(pending, timeout_s)
        return {call.device: a.value for call, a in zip(pending, answers, strict=True)}

    def _lost(self, fleet: Fleet, parts: Mapping[Device, SeatPart]) -> list[Unit]:
        """Return units that are gone with a seat that took part; others are not its matter."""
        lost, alive = fleet.reap(), fleet.pool.alive
        return [u for u in lost if any(d in parts and d not in alive for d in u.devices)]

    def _abandon(
        self, fleet: Fleet, parts: Mapping[Device, SeatPart], op: str, timeout_s: float
    ) -> None:
        alive = {d: {"op": op} for d in parts if d in fleet.pool.alive}
        self._ask(fleet, "abandon", alive, timeout_s)

    def _commit(
        self, fleet: Fleet, parts: Mapping[Device, SeatPart], op: str, timeout_s: float
    ) -> dict[Device, int]:
        """Commit on every seat that is alive; one that cannot, even when asked again, is ended."""
        peaks: dict[Device, int] = {}
        for pending in fleet.pool.send({device: ("commit", {"op": op}) for device in parts}):
            memory = self._committed(fleet, pending, timeout_s)
            if memory is None and pending.device in fleet.pool.alive:
                again = fleet.pool.send({pending.device: ("commit", {"op": op})})[0]
                memory = self._committed(fleet, again, timeout_s)
                if memory is None:
                    fleet.pool.kill(pending.device)
            if memory is not None:
                peaks[pending.device] = memory.peak_bytes
        return peaks

    def _committed(self, fleet: Fleet, pending: Pending, timeout_s: float) -> Memory | None:
        try:
            memory: Memory = fleet.settle([pending], timeout_s)[0].value
        except Exception:  # past the point of no return: what counts is whether the seat lives
            return None
        return memory

    def _parts(
        self,
        fleet: Fleet,
        op: str,
        counters: Mapping[str, int | float],
        numbering: Mapping[Device, int],
        messages: tuple[Bucket, ...],
    ) -> dict[Device, SeatPart]:
        by_rank: dict[int, list[Bucket]] = {rank: [] for rank in numbering.values()}
        for message in messages:
            by_rank[message.source].append(message)
            by_rank[message.target].append(message)
        targets = {d: (u, rank) for u in self.created for rank, d in enumerate(u.devices)}
        taking_part = set(targets) | {d for u in self.ending for d in u.devices} | set(numbering)

        def part(device: Device) -> SeatPart:
            unit, local_rank = targets.get(device, (None, 0))
            mine = [r for r in self.routes if r.target == device]
            return SeatPart(
                op=op,
                rank=numbering.get(device, -1),
                sources=tuple(u.id for u in self.sources if device in u.devices),
                ending=tuple(u.id for u in self.ending if device in u.devices),
                target=None if unit is None else unit.id,
                spec=None if unit is None else fleet.spec(unit, local_rank),
                slots=tuple(self.item_bytes),
                kept=tuple((r.tensor, r.box) for r in mine if r.is_local),
                fetched=tuple((r.tensor, r.box) for r in mine if not r.is_local),
                buckets=tuple(by_rank[numbering[device]]) if device in numbering else (),
                counters=counters,
                staging_bytes=self.staging_bytes,
            )

        return {device: part(device) for device in sorted(taking_part)}
