"""SimAdapter: the four primitives over a job in memory, with every invariant kept on purpose.

A primitive is a transaction: prepare new shards beside the old, carry state into them, verify,
switch units in one step, free what ended. Whatever raises before the switch leaves no trace.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from nereus_adapters.sim import CAPABILITIES
from nereus_core.adapter import Boundary, Fingerprint
from nereus_core.errors import PrimitiveError, StateDiffers, UnitLost
from nereus_core.ledger import Done, Ledger, Standing, require_identical
from nereus_core.ledger_adapter import LedgerAdapter
from nereus_core.observation import Observation
from nereus_core.phases import Enter, Phase
from nereus_core.plan import Plan, check_plan
from nereus_core.primitives import (
    Destroy,
    Merge,
    Primitive,
    Split,
    created,
    ended,
    sources,
    touched,
)
from nereus_core.sim.job import SimJob
from nereus_core.sim.step import Live
from nereus_core.sim.world import Array, Carried
from nereus_core.state import Slot, slots_of, tensor_rules
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import Job, ModelStage


class SimAdapter(LedgerAdapter):
    """Translates the four primitives to a `SimJob`. Implements `nereus_core.adapter.Adapter`."""

    name = "sim"

    def __init__(self, running: SimJob) -> None:
        super().__init__(Ledger(CAPABILITIES, clock=running.world.clock.now_s))
        self._running = running
        self._lock = threading.RLock()
        self._parked: dict[UnitId, Live] = {}

    # --- Reading --------------------------------------------------------------------------------

    def job(self) -> Job:
        """Static facts; failed devices are marked."""
        return self._running.job

    def units(self) -> UnitMap:
        """Units alive now, as the job has them."""
        return self._running.units

    def observe(self) -> Observation:
        """Drain what was seen since the last call."""
        return self._running.seen()

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        """Digest logical state tensor by tensor, whatever the layout."""
        live = self._find(unit)
        return Fingerprint(unit, digests(live, self.job()), dict(live.counters))

    # --- Boundary -------------------------------------------------------------------------------

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        """Hold stages at the safe boundary; on leaving, the batch is shared among units alive."""
        held = self._running.gate.close_on(stages, timeout_s)
        try:
            yield Boundary(held, self._running.steps)
        finally:
            if not self._running.linked:
                self._running.relink()
            self._running.gate.open()

    def relink(self, plan: Plan) -> None:
        """Share the batch among the units alive; raises PlanError when they are not the plan's."""
        check_plan(plan, self.job())
        self._running.relink()
        with self._lock:
            self._parked.clear()

    # --- Primitives -----------------------------------------------------------------------------

    def _standing(self) -> Standing:
        running = self._running
        with self._lock:
            parked = UnitMap(live.unit for live in self._parked.values())
        return Standing(
            job=self.job(),
            alive=self.units(),
            held=running.gate.held,
            inside=running.gate.inside,
            parked=parked,
            lost=running.lost,
        )

    def _do(self, op: Primitive, units: UnitMap, enter: Enter) -> Done:
        job = self._running
        staging = op.staging_bytes if isinstance(op, Split | Merge) else None
        origin = [self._find(u) for u in sources(op)]
        before = {d: job.world.used_bytes(d) for d in touched(op, units)}
        fresh: list[Live] = []
        try:
            enter(Phase.PREPARE)
            if isinstance(op, Merge):
                require_identical(op, self.fingerprint)
            for unit in created(op):
                # one by one: what was prepared before a refusal is discarded below
                fresh.append(job.prepare(unit, staging))  # noqa: PERF401
            enter(Phase.TRANSFER)
            carried = sum((self._carry(origin, live) for live in fresh), Carried())
            enter(Phase.VERIFY)
            job.world.spoil(op.op_id, carried.seals)
            self._verify(op, fresh, carried)
            peaks = {d: max(before[d], job.world.used_bytes(d)) for d in before}
            enter(Phase.COMMIT)
            parked_bytes = self._end(op) if isinstance(op, Destroy) else 0
            gone = job.switch(ended(op), fresh)
        except BaseException as error:
            for live in fresh:
                job.discard(live)
            self._raise_lost(op, units, error)
            raise
        enter(Phase.RELEASE)
        for live in gone:
            job.discard(live)
        for live in fresh:
            job.settle(live)
        return Done(carried.moved_bytes, carried.kept_bytes + parked_bytes, peaks)

    def _carry(self, origin: Sequence[Live], live: Live) -> Carried:
        """Copy state and counters; without an origin among units, load what it starts with."""
        if not origin:
            return self._running.load(live)
        carried = self._running.carry(origin, live, slots_of(live.unit.model_stage.stage))
        for name in live.counters:
            live.counters[name] = origin[0].counters[name]
        return carried

    def _verify(self, op: Primitive, fresh: Sequence[Live], carried: Carried) -> None:
        """Raise unless all state has arrived, as it was sent."""
        for store in (store for live in fresh for store in live.stores):
            if holes := store.holes():
                raise PrimitiveError(f"{op}: no state reached {holes[0]} on {store.device}.", op)
        for seal in carried.seals:
            if part := seal.broken():
                raise StateDiffers(op, part, "another checksum", "the checksum it was sent with")

    def _end(self, op: Destroy) -> int:
        """Hand on what a unit was doing; parked, keep its shards. Returns bytes kept."""
        self._hand_on_requests(op.unit)
        if not op.park:
            return 0
        live = self._running.live(op.unit)
        with self._lock:
            self._parked[op.unit] = live
        return sum(store.num_bytes for store in live.stores)

    def _hand_on_requests(self, unit: UnitId) -> None:
        """Give requests in flight to another unit of the stage, so that none is dropped."""
        requests = self._running.requests
        others = [u.id for u in self.units().of(unit.model_stage) if u.id != unit]
        if unit in requests and others:
            requests[others[0]] = requests.get(others[0], ()) + requests.pop(unit)

    def _raise_lost(self, op: Primitive, units: UnitMap, error: BaseException) -> None:
        """Turn an error into UnitLost when a device that takes part failed meanwhile."""
        alive, part = self.units(), touched(op, units)
        lost = [u for u in units if u not in alive and not part.isdisjoint(units[u].devices)]
        if lost := [u for u in lost if u not in self._parked]:
            raise UnitLost(lost, tuple(alive), str(error)) from error

    # --- State ----------------------------------------------------------------------------------

    def _find(self, unit: UnitId) -> Live:
        with self._lock:
            if unit in self._parked:
                return self._parked[unit]
            try:
                return self._running.live(unit)
            except KeyError:
                raise UnitLost([unit], tuple(self.units()), "it is not alive") from None


def logical(live: Live, job: Job) -> dict[str, Array]:
    """Put a unit's shards together: ``slot/tensor`` -> whole array.

    Raises:
        AssertionError: ranks that hold the same part differ; names tensor and ranks.
    """
    whole: dict[str, Array] = {}
    for slot in slots_of(live.unit.model_stage.stage):
        for rule in tensor_rules(job.model(live.unit.model_stage)):
            key = f"{slot}/{rule.name}"
            array = np.full(rule.shape, np.nan, job.precision.compute)
            for rank, store in enumerate(live.stores):
                if rule.name not in store.shard:
                    continue
                box = store.shard[rule.name]
                place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                part, there = store.arrays[Slot(slot), rule.name], array[place]
                if not np.array_equal(np.where(np.isnan(there), part, there), part):
                    raise AssertionError(f"{key}: rank {rank} differs from a rank before it")
                array[place] = part
            whole[key] = array
    return whole


def digests(live: Live, job: Job) -> dict[str, str]:
    """Return a SHA-256 per logical tensor."""
    return {
        key: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        for key, array in logical(live, job).items()
    }
