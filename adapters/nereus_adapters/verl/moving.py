"""moving: the state of new units, sent shard to shard along the core's routes.

The boxes of an FSDP2 shard group are cuts of each parameter's first dimension, those of
tensor-parallel ranks of one or the other, each stage of a pipeline its own layers; `routes`
intersects those that are needed with those that are there, so that each byte a rank lacks is sent
once, from the nearest holder. Pieces travel through Ray's object store, from the rank that holds
them to the rank that needs them, a bounded number of bytes at a time; no rank ever holds a whole
tensor that it does not need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nereus_adapters.ray_calls import apart, call_all, gathered
from nereus_adapters.verl import shards
from nereus_adapters.verl.cuts import rank_boxes
from nereus_adapters.verl.fleet import Fleet
from nereus_core.cluster import Device
from nereus_core.errors import SeatDead
from nereus_core.phases import Enter, Phase
from nereus_core.state import Box, Route, routes
from nereus_core.units import Unit

BUCKET_BYTES = 256 << 20
"""Bytes in flight at once to each rank; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Move:
    """State of some units, to be made from that of others of the same stage."""

    role: str
    origin: tuple[Unit, ...]
    made: tuple[Unit, ...]
    whole: shards.Outline
    """Of a unit of the origin, all of it."""
    outlines: Mapping[tuple[str, Device], shards.Outline]
    """Of every rank of the origin, by unit and device."""
    routes: tuple[Route, ...]

    @classmethod
    def plan(
        cls, role: str, origin: Sequence[Unit], made: Sequence[Unit], fleet: Fleet, timeout_s: float
    ) -> Move:
        """Ask the ranks of the origin what they hold, and find the routes."""
        outlines: dict[tuple[str, Device], shards.Outline] = {}
        for unit in origin:
            answers = call_all(
                fleet.workers(unit.devices), shards.outline, role, str(unit.id),
                awaited=f"what the ranks of {unit.id} hold", timeout_s=timeout_s,
            )  # fmt: skip
            outlines |= {(str(unit.id), device): found for device, found in answers.items()}
        whole = shards.Outline.of_unit([outlines[str(origin[0].id), d] for d in origin[0].devices])
        before = [(device, _present(found.boxes)) for (_, device), found in outlines.items()]
        after = [
            (device, _present(boxes))
            for unit in made
            for device, boxes in zip(unit.devices, boxes_of(whole, unit), strict=True)
        ]
        return cls(role, tuple(origin), tuple(made), whole, outlines, routes(before, after))

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross between devices."""
        return sum(self._bytes(r) for r in self.routes if not r.is_local)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay on their device."""
        return sum(self._bytes(r) for r in self.routes if r.is_local)

    def run(self, fleet: Fleet, timeout_s: float, enter: Enter) -> None:
        """Stage the new units' state; what fails leaves the old as it was.

        Raises:
            WaitTimeout, SeatDead: a rank did not answer in time or is gone.
            PrimitiveError: a piece arrived changed.
        """
        try:
            self._begin(fleet, timeout_s)
            enter(Phase.TRANSFER)
            for bucket in self._buckets():
                self._send(bucket, fleet, timeout_s)
            enter(Phase.VERIFY)  # every piece was compared with its digest as it arrived
            enter(Phase.COMMIT)
        except BaseException:
            self._forget(fleet, timeout_s)
            raise

    def _begin(self, fleet: Fleet, timeout_s: float) -> None:
        source = self.origin[0]
        for unit in self.made:
            each = {}
            for index, (device, boxes) in enumerate(
                zip(unit.devices, boxes_of(self.whole, unit), strict=True)
            ):
                # Schedules and steps are the same on all ranks; random state is of a rank.
                rank = source.devices[index % len(source.devices)]
                extras = self.outlines[str(source.id), rank].extras
                each[device] = (boxes, replace(self.whole, extras=extras))
            call_all(
                fleet.workers(unit.devices), shards.begin, str(unit.id), self.role,
                awaited=f"room for {unit.id}", timeout_s=timeout_s, each=each,
            )  # fmt: skip

    def _send(self, bucket: Sequence[Route], fleet: Fleet, timeout_s: float) -> None:
        """Move a bucket: every pair of ranks has one message."""
        pairs: dict[tuple[Device, str, Device], list[tuple[str, Box]]] = defaultdict(list)
        for route in bucket:
            pairs[route.source, self._holder(route), route.target].append((route.tensor, route.box))
        inbox: dict[Device, list[Any]] = defaultdict(list)
        for (source, unit, target), wanted in pairs.items():
            worker = fleet.seat(source).worker
            inbox[target].append(apart(worker, shards.send, self.role, unit, wanted))
        asked = {
            device: apart(
                fleet.seat(device).worker, shards.receive, self._target(device), *messages
            )
            for device, messages in inbox.items()
        }
        named = ", ".join(str(unit.id) for unit in self.made)
        awaited = f"the state of {named}"
        try:
            gathered(asked, awaited=awaited, timeout_s=timeout_s)
        except SeatDead:
            # Ray gives a receiver the death of its sender: ask the senders who it was.
            senders = dict.fromkeys(source for source, _, _ in pairs)
            call_all(fleet.workers(senders), shards.present, awaited=awaited, timeout_s=timeout_s)
            raise

    def _buckets(self) -> Iterator[list[Route]]:
        bucket: list[Route] = []
        load: dict[Device, int] = defaultdict(int)
        for route in self.routes:
            size = self._bytes(route)
            if bucket and load[route.target] + size > BUCKET_BYTES:
                yield bucket
                bucket, load = [], defaultdict(int)
            bucket.append(route)
            load[route.target] += size
        if bucket:
            yield bucket

    def _bytes(self, route: Route) -> int:
        outline = self.outlines[self._holder(route), route.source]
        each = sum(t.itemsize for (_, name), t in outline.dtypes.items() if name == route.tensor)
        return int(each) * route.box.num_elements

    def _holder(self, route: Route) -> str:
        """Name the unit whose rank sends."""
        for unit in self.origin:
            key = str(unit.id), route.source
            held = self.outlines[key].boxes.get(route.tensor) if key in self.outlines else None
            if held is not None and held.intersect(route.box) == route.box:
                return str(unit.id)
        raise KeyError(f"{route.source} does not hold {route.tensor} at {route.box}")

    def _target(self, device: Device) -> str:
        return next(str(unit.id) for unit in self.made if device in unit.devices)

    def _forget(self, fleet: Fleet, timeout_s: float) -> None:
        for unit in self.made:
            for worker in fleet.workers(unit.devices).values():
                apart(worker, shards.drop, [str(unit.id)])


def boxes_of(whole: shards.Outline, unit: Unit) -> list[dict[str, Box]]:
    """Return the boxes of every rank of a unit."""
    return rank_boxes(whole.shapes, whole.cuts, whole.num_layers, unit.layout)


def _present(boxes: Mapping[str, Box]) -> dict[str, Box]:
    """Leave out empty boxes: nothing has to go there."""
    return {name: box for name, box in boxes.items() if box.num_elements}
