"""Fleet: the units alive on a pool's seats, and collective calls to them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from nereus_adapters.torch.channel import Answer, Pending
from nereus_adapters.torch.engine import PeerLost
from nereus_adapters.torch.values import ModelSource, ShardSpec
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, SeatDead, UnitLost, WaitTimeout
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ModelStage, Stage

GRACE_S = 5.0
"""The driver waits this much longer than seats wait for each other, so that only a seat that
hangs itself is late; where they wait for less, by as much again. Chosen, not measured."""


_generations = itertools.count()
"""Names groups: a name is used once on a store, which may outlive a job."""


class Pool(Protocol):
    """What a fleet needs of a pool of seats."""

    @property
    def alive(self) -> frozenset[Device]:
        """Devices whose seat answers."""
        ...

    @property
    def draining(self) -> frozenset[Device]:
        """Devices announced to leave, their seats still alive."""
        ...

    @property
    def returned(self) -> frozenset[Device]:
        """Lost devices whose new seat is up; `start` takes it in."""
        ...

    def start(self, devices: Iterable[Device]) -> None:
        """Start seats and wait until they are up; a live one is left alone."""
        ...

    def send(self, calls: Mapping[Device, tuple[str, Mapping[str, Any]]]) -> list[Pending]:
        """Put one call per device in line, in one go, in device order."""
        ...

    def require(self, need: int) -> None:
        """Raise DevicesMissing unless there are as many devices of the pool's kind."""
        ...

    def call(self, device: Device, method: str, **kwargs: Any) -> Pending:
        """Put one call in line."""
        ...

    def kill(self, device: Device) -> None:
        """End a seat without notice, and wait until it is gone."""
        ...

    def stop(self, device: Device) -> None:
        """Let a seat finish its calls and end."""
        ...

    def pid(self, device: Device) -> int:
        """Return the process id of a seat, on its host."""
        ...

    def close(self) -> None:
        """End all seats. Safe to call twice."""
        ...


class Fleet:
    """Units on seats. `units` leaves out every unit that has lost a seat. Thread-safe."""

    def __init__(self, pool: Pool, sources: Mapping[str, ModelSource], timeout_s: float) -> None:
        self.pool, self.sources, self.timeout_s = pool, sources, timeout_s
        self._units = UnitMap()
        self._parked: dict[UnitId, Unit] = {}
        self._links: dict[UnitId, object] = {}
        self.unheard: tuple[UnitId, ...] = ()
        """Units lost since the last relink."""
        self.may_read = True
        """Whether seats of one host read each other's memory: until the kernel refuses once."""
        self._lock = threading.RLock()

    # --- Units --------------------------------------------------------------------------------

    @property
    def units(self) -> UnitMap:
        """Units all of whose seats are alive."""
        with self._lock:
            alive = self.pool.alive
            return UnitMap(u for u in self._units.values() if alive.issuperset(u.devices))

    @property
    def parked(self) -> Mapping[UnitId, Unit]:
        """Ended units whose state is still in host memory of their seats."""
        with self._lock:
            alive = self.pool.alive
            return {i: u for i, u in self._parked.items() if alive.issuperset(u.devices)}

    def replace(
        self, ended: Iterable[UnitId], created: Iterable[Unit], parked: Iterable[Unit] = ()
    ) -> None:
        """Record what a primitive did."""
        ended = tuple(ended)
        with self._lock:
            self._units = self._units.replace(ended, created)
            self._parked.update({unit.id: unit for unit in parked})
            for unit in ended:
                self._links.pop(unit, None)

    def unpark(self) -> None:
        """Let go of all parked state."""
        with self._lock:
            gone, self._parked = self._parked, {}
        for unit in gone.values():
            calls = {d: ("unpark", {"unit": unit.id}) for d in unit.devices if d in self.pool.alive}
            self.settle(self.pool.send(calls), self.timeout_s)

    def reap(self) -> tuple[Unit, ...]:
        """Forget units that have lost a seat, free their shards elsewhere, and return them."""
        with self._lock:
            alive = self.pool.alive
            lost = tuple(u for u in self._units.values() if not alive.issuperset(u.devices))
            self._parked = dict(self.parked)
            self._forget(lost)
        for unit in lost:
            self.drop(unit)
        return lost

    def discard(self, units: Iterable[Unit]) -> None:
        """Give up units that cannot go on; they count as lost."""
        units = tuple(units)
        with self._lock:
            self._forget(units)
        for unit in units:
            self.drop(unit)

    def _forget(self, lost: Sequence[Unit]) -> None:
        self._units = self._units.replace((u.id for u in lost), ())
        if lost:
            self._links.clear()
            self.unheard += tuple(u.id for u in lost)

    def drop(self, unit: Unit, *, park: bool = False) -> None:
        """Let go of a unit's shards on the seats that are alive."""
        calls = {
            d: ("drop", {"unit": unit.id, "park": park})
            for d in unit.devices
            if d in self.pool.alive
        }
        self.settle(self.pool.send(calls), self.timeout_s)

    def spec(self, unit: Unit, local_rank: int) -> ShardSpec:
        """Return how to build one rank of a unit."""
        stage = unit.model_stage
        return ShardSpec(self.sources[stage.model], unit.layout, local_rank, stage.stage)

    def start(self, devices: Iterable[Device]) -> None:
        """Start seats, and let each import what shards of the fleet's models need."""
        devices = tuple(devices)
        self.pool.start(devices)
        specs = [ShardSpec(s, Layout(1, 1), 0, Stage.INFER) for s in self.sources.values()]
        self.settle(
            self.pool.send({device: ("warm", {"specs": specs}) for device in devices}),
            self.timeout_s,
        )

    def build(self, units: Iterable[Unit]) -> None:
        """Build units with their start-up weights."""
        units = tuple(units)
        self.load(units)
        self.replace((), units)

    def load(self, units: Iterable[Unit]) -> None:
        """Build units on their seats; they are not alive yet."""
        pending = [
            p
            for unit in units
            for p in self.pool.send(
                {
                    device: ("build", {"unit": unit.id, "spec": self.spec(unit, rank)})
                    for rank, device in enumerate(unit.devices)
                }
            )
        ]
        self.settle(pending, self.timeout_s)

    def unload(self, unit: Unit) -> None:
        """Undo a `load` that may have failed on any seat."""
        for device in unit.devices:
            if device in self.pool.alive:
                calls = {device: ("unload", {"unit": unit.id})}
                self.settle(self.pool.send(calls), self.timeout_s)

    # --- Calls --------------------------------------------------------------------------------

    def send(self, shares: Mapping[UnitId, Mapping[str, Any]], method: str) -> list[Pending]:
        """Call a method on all seats of some units, in one go, with each unit's arguments.

        Returns:
            Calls in order of units, and of local ranks inside a unit.

        Raises:
            UnitLost: a unit is not alive.
        """
        units = self.units
        gone = [unit for unit in shares if unit not in units]
        if gone:
            raise UnitLost(gone, tuple(units), f"before {method}")
        ranks = [(d, unit) for unit in shares for d in units[unit].devices]
        sent = self.pool.send({d: (method, {"unit": unit, **shares[unit]}) for d, unit in ranks})
        by_device = {call.device: call for call in sent}
        return [by_device[device] for device, _ in ranks]

    def settle(self, pending: Sequence[Pending], timeout_s: float) -> list[Answer]:
        """Wait for every call, also after one has failed, and return the answers in order.

        A seat that does not answer in time is ended: nothing can be said of its state.

        Raises:
            Exception: of all that went wrong, what most likely caused the rest.
        """
        deadline = time.monotonic() + timeout_s + min(GRACE_S, timeout_s)
        answers: list[Answer] = []
        errors: list[Exception] = []
        late: list[Exception] = []
        for call in pending:
            try:
                answers.append(call.wait(max(0.0, deadline - time.monotonic())))
            except Exception as error:
                if isinstance(error, WaitTimeout) and not call.future.done():
                    self.pool.kill(call.device)
                    error = WaitTimeout(error.awaited, timeout_s)
                    late.append(error)
                errors.append(error)
        if errors:
            # Peers of a seat that hangs have waited in vain too: it is the one to name.
            raise min(errors, key=lambda error: (_consequence(error), error not in late))
        return answers

    def counters(self, unit: Unit) -> dict[str, int | float]:
        """Return a unit's counters, as its first rank has them."""
        call = self.pool.send({unit.devices[0]: ("counters", {"unit": unit.id})})
        found: dict[str, int | float] = self.settle(call, self.timeout_s)[0].value
        return found

    # --- Groups -------------------------------------------------------------------------------

    def link(self) -> None:
        """Build the groups of every unit whose peers have changed.

        Train units of a stage are one data-parallel group; others stand alone.

        Raises:
            NereusError: units of a train stage have different layouts.
        """
        units = self.units
        for stage in units.stages():
            members = units.of(stage)
            if stage.stage is Stage.TRAIN:
                self._link(stage, members)
            else:
                for unit in members:
                    self._link(stage, (unit,))

    def _link(self, stage: ModelStage, members: tuple[Unit, ...]) -> None:
        if len({u.layout for u in members}) > 1:
            raise NereusError(
                f"units of {stage} have different layouts "
                f"({', '.join(map(str, members))}); finish the transition first."
            )
        key = tuple(u.id for u in members)
        if all(self._links.get(u.id) == key for u in members):
            return
        prefix = f"link{next(_generations)}"
        calls = {
            device: (
                "link",
                {
                    "unit": unit.id,
                    "prefix": prefix,
                    "position": position,
                    "num_units": len(members),
                    "timeout_s": self.timeout_s,
                },
            )
            for position, unit in enumerate(members)
            for device in unit.devices
        }
        self.settle(self.pool.send(calls), self.timeout_s)
        self._links.update({u.id: key for u in members})

    def unlinked(self) -> None:
        """Assume that no group works any more."""
        self._links.clear()


def _consequence(error: Exception) -> int:
    """Rank errors: what a dead or failing seat raises comes before what its peers noticed."""
    if isinstance(error, SeatDead):
        return 0
    if isinstance(error, PeerLost):
        return 3
    return 2 if isinstance(error, WaitTimeout) else 1
