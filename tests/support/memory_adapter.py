"""An adapter over nothing but values: units in a dict, state as arrays of the state map.

It applies `primitives.apply`, moves real arrays along `state.routes`, interleaves concurrent
primitives by yielding a seeded number of times, and raises AssertionError for what an executor must
never do: overlapping primitives, primitives outside a boundary, a device acquired by one stage
before another that leaves it has released it.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from nereus_core.adapter import Boundary, Fingerprint, Receipt
from nereus_core.cost.transition import shared_elements
from nereus_core.errors import NotAtBoundary, UnitLost
from nereus_core.observation import Observation, TokenStats
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.primitives import (
    Destroy,
    Extend,
    acquired,
    apply,
    check,
    created,
    ended,
    model_stage_of,
    released,
    sources,
    touched,
)
from nereus_core.state import (
    Slot,
    moved_elements,
    placed,
    routes,
    slots_of,
    tensor_rules,
    unit_shards,
)
from nereus_core.units import Unit, UnitId, UnitMap


def units_of(plan: Plan) -> UnitMap:
    """Number the units of a plan from 0."""
    return UnitMap(
        Unit(UnitId(stage, i), placement.layout, devices)
        for stage, placement in plan.items()
        for i, devices in enumerate(placement.units)
    )


class MemoryAdapter:
    """Implements `nereus_core.adapter.Adapter`; ``fault(op, phase)`` may raise or wait."""

    name = "memory"

    def __init__(self, job, plan, *, seed=0, with_state=False, fault=None, timeline=None):
        self._job, self._units, self.parked = job, units_of(plan), UnitMap()
        self._lock, self._random = threading.Lock(), random.Random(seed)
        self._running: dict[str, frozenset] = {}
        self._receipts: dict[str, Receipt] = {}
        self.held: frozenset | None = frozenset(job.workload.stages)
        """Stages of the open boundary; a test that needs no boundary leaves all held."""
        self.fault: Callable | None = fault
        self.on_phase: Callable | None = None
        self.log: list[tuple[str, object]] = []
        self.most_at_once = 0
        self.plan_linked: Plan | None = None
        self.steps: dict = dict.fromkeys(job.workload.stages, 7)
        self.failed: set = set()
        self.draining: set = set()
        self.observed: Callable[[MemoryAdapter], Observation] | None = None
        self.state: dict[tuple[UnitId, int], dict] = {}
        self.with_state = with_state
        if with_state:
            for unit in self._units.values():
                self._start(unit)

    def _start(self, unit):
        whole, model = self._whole(unit), self._job.model(unit.model_stage)
        for rank, shard in enumerate(unit_shards(model, unit.layout)):
            self.state[unit.id, rank] = {
                (slot, name): whole[slot, name][_at(box)].copy()
                for name, box in shard.items()
                for slot in slots_of(unit.model_stage.stage)
            }

    def _whole(self, unit):
        seed = sum(map(ord, unit.model_stage.model))
        rng = np.random.default_rng(seed)
        return {
            (slot, rule.name): rng.integers(0, 1000, rule.shape)
            for slot in Slot
            for rule in tensor_rules(self._job.model(unit.model_stage))
        }

    # --- reading ---

    def job(self):
        return self._job.on(self._job.cluster.without(self.failed))

    def units(self):
        return self._units.intact(self.failed)

    def observe(self):
        assert self.observed is not None
        return self.observed(self)

    # --- boundary ---

    @contextlib.contextmanager
    def boundary(self, stages, *, timeout_s):
        if self.held is not None and self.held != frozenset(self._job.workload.stages):
            raise NotAtBoundary("a second boundary")
        self.held, before = frozenset(stages), self.held
        self.log.append(("boundary", self.held))
        try:
            yield Boundary(self.held, 0)
        finally:
            self.held = before
            self.log.append(("resume", None))

    def watch(self, on_phase):
        self.on_phase = on_phase

    def _enter(self, op, phase):
        if self.on_phase:
            self.on_phase(op, phase)
        if self.fault:
            self.fault(op, phase)

    def relink(self, plan):
        self.log.append(("relink", plan))
        self.plan_linked, self.parked = plan, UnitMap()

    def fingerprint(self, unit):
        whole = self.whole_of(self._units[unit])
        return Fingerprint(
            unit,
            {f"{s}/{n}": hashlib.sha256(a.tobytes()).hexdigest() for (s, n), a in whole.items()},
            {"step": self.steps[unit.model_stage]},
        )

    def whole_of(self, unit) -> Mapping:
        """Logical state of a unit, put together from its shards; replicas must agree."""
        model = self._job.model(unit.model_stage)
        rules = {rule.name: rule.shape for rule in tensor_rules(model)}
        found: dict = {}
        for rank, shard in enumerate(unit_shards(model, unit.layout)):
            for (slot, name), part in self.state.get((unit.id, rank), {}).items():
                whole = found.setdefault((slot, name), np.full(rules[name], -1))
                seen = whole[_at(shard[name])]
                assert ((seen == -1) | (seen == part)).all(), f"{unit}: replicas of {name} differ"
                whole[_at(shard[name])] = part
        assert all((a >= 0).all() for a in found.values())
        return found

    def close(self):
        pass

    # --- primitives ---

    def split(self, op):
        return self._do(op)

    def merge(self, op):
        return self._do(op)

    def extend(self, op):
        return self._do(op)

    def destroy(self, op):
        return self._do(op)

    def _do(self, op):
        atlas = UnitMap([*self._units.values(), *self.parked.values()])
        with self._lock:
            if op.op_id in self._receipts:
                return self._receipts[op.op_id]
            if self.held is None or model_stage_of(op) not in self.held:
                raise NotAtBoundary(str(op), op)
            check(op, self.units(), self.parked)
            devices = touched(op, atlas)
            for other, busy in self._running.items():
                assert busy.isdisjoint(devices), f"{op.op_id} overlaps {other}"
            lost = devices & self.failed
            if lost:
                gone = [u for u in self._units if not set(self._units[u].devices).isdisjoint(lost)]
                raise UnitLost(gone, tuple(self.units()))
            self._running[op.op_id] = devices
            self.most_at_once = max(self.most_at_once, len(self._running))
            spins = self._random.randrange(20)
        try:
            for phase in (Phase.PREPARE, Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT):
                self._enter(op, phase)
                for _ in range(spins):
                    time.sleep(0)  # lets another primitive run; no time passes
            with self._lock:
                receipt = self._commit(op, atlas)
            self._enter(op, Phase.RELEASE)
            return receipt
        finally:
            with self._lock:
                del self._running[op.op_id]

    def _commit(self, op, atlas):
        before = self.units()
        model, stage = self._job.model(model_stage_of(op)), model_stage_of(op)
        senders = [atlas[u] for u in sources(op)]
        moved = total = 0
        if isinstance(op, Extend) and not op.sources:
            assert self._job.workload.node(stage).origin
            moved = total = _counted(model, (), created(op))[1]
            if self.with_state:
                self._start(op.unit)
        elif created(op) and not self.with_state:
            moved, total = _counted(model, senders, created(op))
        elif created(op):
            after = [pair for u in created(op) for pair in placed(model, u.layout, u.devices)]
            held = [pair for u in senders for pair in placed(model, u.layout, u.devices)]
            found = routes(held, after)
            moved, total = moved_elements(found), sum(r.box.num_elements for r in found)
            self._carry(op, senders, found, model, stage)
        self._units = apply(op, before, self.parked)
        if isinstance(op, Destroy) and op.park:
            self.parked = UnitMap([*self.parked.values(), before[op.unit]])
        elif self.with_state:
            for unit in ended(op):
                for rank in range(before[unit].layout.num_devices):
                    self.state.pop((unit, rank), None)
        each = len(slots_of(stage.stage))
        receipt = Receipt(
            op.op_id,
            created(op),
            ended(op),
            acquired(op, before),
            released(op, before),
            moved * each,
            (total - moved) * each,
            0.0,
            {},
        )
        self._receipts[op.op_id] = receipt
        self.log.append(("done", op))
        return receipt

    def _carry(self, op, senders, found, model, stage):
        owners: dict = {}
        for unit in senders:
            for rank, device in enumerate(unit.devices):
                shard = unit_shards(model, unit.layout)[rank]
                owners.setdefault(device, []).append((self.state[unit.id, rank], shard))
        slots = slots_of(stage.stage)
        for unit in created(op):
            for rank, (device, shard) in enumerate(placed(model, unit.layout, unit.devices)):
                mine = {
                    (slot, name): np.full(box.shape, -1)
                    for name, box in shard.items()
                    for slot in slots
                }
                for route in (r for r in found if r.target == device):
                    for held, boxes in owners[route.source]:
                        box = boxes.get(route.tensor)
                        if box is not None and route.box.intersect(box) == route.box:
                            for slot in slots:
                                mine[slot, route.tensor][route.box.within(shard[route.tensor])] = (
                                    held[slot, route.tensor][route.box.within(box)]
                                )
                            break
                self.state[unit.id, rank] = mine
        assert isinstance(op, Extend) or all(u in self._units for u in ended(op))


def _counted(model, senders, made):
    """Elements moved and needed, without writing down a route for each."""
    held: dict = {}
    for unit in senders:
        for rank, device in enumerate(unit.devices):
            held.setdefault(device, []).append((unit.layout, rank))
    kept = total = 0
    for unit in made:
        for rank, device in enumerate(unit.devices):
            shard = (unit.layout, rank)
            total += shared_elements(model, shard, shard)
            kept += max((shared_elements(model, h, shard) for h in held.get(device, ())), default=0)
    return total - kept, total


def _at(box):
    return tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))


def tokens(mean: float, count: int = 16) -> TokenStats:
    """Token counts without spread."""
    return TokenStats.of([round(mean)] * count)
