"""Weight synchronisation: stages that follow a training stage take its parameters, seat to seat."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereus_adapters.torch.fleet import Fleet
from nereus_adapters.torch.reading import Unreadable
from nereus_adapters.torch.routing import buckets, ranks
from nereus_adapters.torch.values import Bucket, SyncPart
from nereus_adapters.torch.ways import turned, ways
from nereus_core.cluster import Device
from nereus_core.errors import UnitLost
from nereus_core.state import Slot, placed, routes
from nereus_core.units import Unit
from nereus_core.workload import ModelStage, Workload

_generations = itertools.count()
"""Names groups: a name is used once on a store, which may outlive a job."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Who sends what to whom for one following stage; holds while units stay the same."""

    train: tuple[Unit, ...]
    followers: tuple[Unit, ...]
    seats: tuple[Device, ...]
    numbering: Mapping[Device, int]
    """Ranks of the seats between which something crosses."""
    moved_bytes: int


class Weights:
    """Keeps every follower at the version of its source."""

    def __init__(
        self, fleet: Fleet, workload: Workload, param_bytes: int, bucket_bytes: int
    ) -> None:
        self._fleet, self._workload = fleet, workload
        self._param_bytes, self._bucket_bytes = param_bytes, bucket_bytes
        self._lanes: dict[ModelStage, Lane] = {}

    def followers(self) -> tuple[tuple[ModelStage, ModelStage], ...]:
        """Pairs (train stage, stage that follows it)."""
        return tuple(
            (n.weights_from, n.model_stage)
            for n in self._workload.nodes
            if n.weights_from is not None
        )

    def synchronize(self) -> None:
        """Bring every follower that lags to the version of its source.

        Raises:
            UnitLost: a stage has no unit.
            SeatDead, PeerLost, WaitTimeout: a seat failed; versions tell who lags.
        """
        for source, follower in self.followers():
            units = self._fleet.units
            for stage in (source, follower):
                if not units.of(stage):
                    raise UnitLost([stage], tuple(units), "weight synchronisation")
            version = int(self._fleet.counters(units.of(source)[0])["weight_version"])
            lagging = [
                u
                for u in units.of(follower)
                if self._fleet.counters(u)["weight_version"] != version
            ]
            if lagging:
                self._send(source, follower, version)

    def forget(self) -> None:
        """Assume that no lane works any more."""
        self._lanes.clear()

    def _send(self, source: ModelStage, follower: ModelStage, version: int) -> None:
        lane, name = self._lane(source, follower), str(follower)
        left = self._ask("sync", {d: {"lane": name} for d in lane.seats})
        expected = turned(left, lane.numbering)
        self._ask(
            "synced",
            {
                d: {"lane": name, "left": expected.get(d, {}), "version": version}
                for d in lane.seats
            },
        )

    def _ask(self, method: str, calls: Mapping[Device, Mapping[str, Any]]) -> dict[Device, Any]:
        pending = self._fleet.pool.send({d: (method, kwargs) for d, kwargs in calls.items()})
        answers = self._fleet.settle(pending, self._fleet.timeout_s)
        return {call.device: a.value for call, a in zip(pending, answers, strict=True)}

    def _lane(self, source: ModelStage, follower: ModelStage) -> Lane:
        units = self._fleet.units
        train, followers = units.of(source), units.of(follower)
        known = self._lanes.get(follower)
        if known is None or (known.train, known.followers) != (train, followers):
            known = self._open(train, followers, str(follower))
            self._lanes[follower] = known
        return known

    def _open(self, train: tuple[Unit, ...], followers: tuple[Unit, ...], name: str) -> Lane:
        model = self._fleet.sources[train[0].model_stage.model].spec
        before = [pair for u in train for pair in placed(model, u.layout, u.devices)]
        after = [pair for u in followers for pair in placed(model, u.layout, u.devices)]
        found = routes(before, after)
        numbering = ranks(found)
        messages = buckets(found, {Slot.PARAM: self._param_bytes}, numbering, self._bucket_bytes)

        def mine(device: Device) -> tuple[Bucket, ...]:
            rank = numbering.get(device)
            return tuple(m for m in messages if rank in (m.source, m.target))

        def part(device: Device) -> SyncPart:
            here = [r for r in found if r.is_local and r.target == device]
            return SyncPart(
                rank=numbering.get(device, -1),
                sources=tuple(u.id for u in train if device in u.devices),
                target=next((u.id for u in followers if device in u.devices), None),
                kept=tuple((r.tensor, r.box) for r in here),
                buckets=mine(device),
            )

        seats = tuple(sorted(set(numbering) | {d for u in followers for d in u.devices}))
        offers = self._ask("open_lane", {d: {"name": name, "part": part(d)} for d in seats})

        def join() -> None:
            chosen = ways(
                offers,
                numbering,
                messages,
                f"sync{next(_generations)}/{name}",
                self._fleet.timeout_s,
                may_read=self._fleet.may_read,
            )
            self._ask("join_lane", {d: {"name": name, "ways": way} for d, way in chosen.items()})

        try:
            join()
        except Unreadable:
            self._fleet.may_read = False
            join()
        moved = sum(r.box.num_elements for r in found if not r.is_local) * self._param_bytes
        return Lane(train, followers, seats, numbering, moved)
