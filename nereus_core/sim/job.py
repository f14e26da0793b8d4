"""An RL job in memory: a sampler, units with real small state, steps with losses that depend on it.

This is the imaginary framework that the reference adapter translates to. It knows units, stores
and routing; it knows no primitive.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from nereus_core.cluster import Device
from nereus_core.errors import UnitLost
from nereus_core.gate import Gate
from nereus_core.harness import StepResult
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Plan, check_plan
from nereus_core.sim import training
from nereus_core.sim.clock import Clock, WallClock
from nereus_core.sim.pace import Script
from nereus_core.sim.step import Live, Run
from nereus_core.sim.world import Carried, Store, World
from nereus_core.state import Route, Shard, Slot, placed, routes, slots_of
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage, Stage


@lru_cache(maxsize=1024)
def _cached_routes(
    model: ModelSpec,
    before: tuple[tuple[Layout, tuple[Device, ...]], ...],
    after: tuple[Layout, tuple[Device, ...]],
) -> tuple[Route, ...]:
    held: list[tuple[Device, Shard]] = [p for source in before for p in placed(model, *source)]
    return routes(held, placed(model, *after))


class SimJob:
    """A running job. Methods that change units are called at a boundary; reads may come any time.

    Args:
        job: what runs; its precision must be float64 or float32, since numpy has no bfloat16.
        plan: where it runs at first.
        script: seed and response lengths.
        clock: virtual for scale, the wall's otherwise.
        wait_s: most seconds a step waits for a boundary to close.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        *,
        script: Script | None = None,
        clock: Clock | None = None,
        wait_s: float = 60.0,
    ) -> None:
        check_plan(plan, job)
        if job.precision.compute == "bfloat16":
            raise ValueError("simulated state is float64 or float32; numpy has no bfloat16")
        self._job, self.script = job, script or Script()
        self.world = World(job.cluster, clock or WallClock())
        self.gate = Gate(wait_s, asynchronous=job.workload.asynchronous)
        self._lock = threading.RLock()
        self._live: dict[UnitId, Live] = {}
        self._serials: dict[ModelStage, int] = {}
        self._routing: dict[ModelStage, tuple[UnitId, ...]] = {}
        self._unheard: tuple[UnitId, ...] = ()
        self.lost: set[UnitId] = set()
        """Units that a failed device has taken, ever."""
        self.steps = 0
        self.position = 0
        """Of the sampler: the id of the next prompt."""
        self.requests: dict[UnitId, tuple[int, ...]] = {}
        """Prompts given to generating units and not yet trained on."""
        self.served: dict[UnitId, int] = {}
        """Weight version that each unit generated them with."""
        self._seen: Observation | None = None
        for stage, placement in plan.items():
            for serial, devices in enumerate(placement.units):
                live = self.prepare(Unit(UnitId(stage, serial), placement.layout, devices))
                self.load(live)
                self.switch((), (live,))
        self.relink()

    def load(self, live: Live) -> Carried:
        """Fill a unit with its start-up weights, as from a checkpoint."""
        stage = live.unit.model_stage
        for store in live.stores:
            training.initialise(store, self._job.model(stage), self._seed(stage))
        return Carried(moved_bytes=sum(store.num_bytes for store in live.stores))

    def _seed(self, stage: ModelStage) -> int:
        # Models differ in their state; ref starts as a copy of actor, as in practice.
        return self.script.seed + (1 if stage.model == "critic" else 0)

    # --- Units ----------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """Static facts, on the cluster as it is now."""
        return self._job.on(self.world.cluster)

    @property
    def units(self) -> UnitMap:
        """Units alive."""
        with self._lock:
            return UnitMap(live.unit for live in self._live.values())

    def live(self, unit: UnitId) -> Live:
        """Return a unit with its state; raises KeyError when it is not alive."""
        with self._lock:
            return self._live[unit]

    def prepare(self, unit: Unit, staging_bytes: int | None = None) -> Live:
        """Reserve memory and make empty storage for a unit that does not take part yet.

        Beyond ``staging_bytes`` on a device, storage is in host memory until `settle`.

        Raises:
            OutOfDeviceMemory: a device has not enough left; nothing was reserved.
        """
        stage = unit.model_stage.stage
        shards = placed(self._job.model(unit.model_stage), unit.layout, unit.devices)
        dtype, slots = self._job.precision.compute, slots_of(stage)
        each = self._job.precision.param_bytes if dtype == "float64" else 4
        needs = {
            d: each * len(slots) * sum(b.num_elements for b in shard.values())
            for d, shard in shards
        }
        limit = max(needs.values()) if staging_bytes is None else staging_bytes
        self.world.reserve(unit, {d: min(n, limit) for d, n in needs.items()}, str(unit))
        stores = tuple(Store.empty(d, shard, slots, dtype) for d, shard in shards)
        counters = {"weight_version": 0}
        if stage is Stage.TRAIN:
            counters |= {"step": 0, "rng": 0}
        return Live(unit, stores, counters)

    def settle(self, live: Live) -> None:
        """Bring what waits in host memory to its device, once there is room."""
        staged = self.world.held_bytes(live.unit)
        needs = {s.device: s.num_bytes - staged.get(s.device, 0) for s in live.stores}
        self.world.reserve(live.unit, {d: n for d, n in needs.items() if n}, str(live.unit))

    def discard(self, live: Live) -> None:
        """Free the storage of a unit that was prepared or has ended."""
        self.world.release(live.unit)

    def switch(self, gone: Iterable[UnitId], come: Iterable[Live]) -> tuple[Live, ...]:
        """Units end and others begin, at once; returns those that ended, whose memory is held.

        Raises:
            KeyError: one of those to end is not alive; nothing has changed.
            SeatDead: one of those to begin has lost a device; nothing has changed.
        """
        come = tuple(come)
        with self._lock:
            for unit in (live.unit for live in come):
                self.world.alive(unit.devices, f"the beginning of {unit}")
            left = tuple(self._live[unit] for unit in gone)
            for live in left:
                del self._live[live.unit.id]
            self._live.update({live.unit.id: live for live in come})
            return left

    def carry(self, sources: Sequence[Live], target: Live, slots: Sequence[Slot]) -> Carried:
        """Copy state into a unit from others of the same model, along the state map's routes."""
        model = self._job.model(target.unit.model_stage)
        before = tuple((s.unit.layout, s.unit.devices) for s in sources)
        found = _cached_routes(model, before, (target.unit.layout, target.unit.devices))
        # Where two sources share a device, either may be read: they hold the same model.
        origin: dict[Device, list[Store]] = defaultdict(list)
        for source in sources:
            for store in source.stores:
                origin[store.device].append(store)
        targets = {store.device: store for store in target.stores}
        total = Carried()
        for stores in _choices(origin):
            mine = [r for r in found if _holds(stores.get(r.source), r)]
            found = tuple(r for r in found if r not in mine)
            total += self.world.carry(mine, slots, stores, targets)
        return total

    def relink(self) -> None:
        """Make the units alive the ones that share the batch, in order of id."""
        with self._lock:
            units = self.units
            self._routing = {s: tuple(u.id for u in units.of(s)) for s in self._job.workload.stages}
            self._unheard = ()

    @property
    def linked(self) -> bool:
        """Whether the batch is shared among exactly the units alive."""
        with self._lock:
            return {u for ids in self._routing.values() for u in ids} == set(self._live)

    # --- Devices --------------------------------------------------------------------------------

    def fail(self, device: Device) -> None:
        """Lose a device: units that held it are gone, their other shards are freed."""
        with self._lock:
            self.world.fail(device)
            lost = [u for u, live in self._live.items() if device in live.unit.devices]
            for unit in lost:
                self.discard(self._live.pop(unit))
            self._unheard += tuple(lost)
            self.lost.update(lost)

    # --- Steps ----------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Run one RL step.

        Raises:
            UnitLost: a unit of the step is gone; nothing was trained.
        """
        with self.gate.step():
            start_s = self.world.clock.now_s()
            run = Run(self, self.steps)
            if self._job.workload.asynchronous:
                result = self._asynchronous_step(run)
            else:
                run.generate()
                result = run.train()
            self.steps += 1
            with self._lock:
                self._seen = run.observation(self.world.clock.now_s() - start_s, result)
            return result

    def _asynchronous_step(self, run: Run) -> StepResult:
        if not self.requests:
            run.generate()
        with self.gate.critical():
            result = run.train()
        run.generate()
        return result

    def draw(self) -> tuple[int, ...]:
        """Take the next global batch of prompts from the sampler."""
        first = self.position
        self.position += self._job.global_batch
        return tuple(range(first, self.position))

    def pending(self) -> tuple[int, ...]:
        """Prompts in flight, in the order in which they were drawn."""
        return tuple(sorted(s for part in self.requests.values() for s in part))

    def participants(self, stage: ModelStage) -> tuple[Live, ...]:
        """Return the units that share the batch in a stage, in order; raises UnitLost."""
        with self._lock:
            ids = self._routing[stage]
            gone = self._unheard or tuple(u for u in ids if u not in self._live)
            if gone or not ids:
                raise UnitLost(gone or [stage], tuple(self._live), "noticed by the step")
            return tuple(self._live[u] for u in ids)

    def seen(self) -> Observation:
        """Return what was seen since the last call."""
        with self._lock:
            seen, self._seen = self._seen, None
        nothing = TokenStats.of([])
        healthy = frozenset(self.world.cluster.healthy)
        if seen is None:
            return Observation(
                self.steps - 1, 0.0, {}, nothing, nothing, self.world.take_peaks({}),
                healthy, self.world.draining,
            )  # fmt: skip
        return replace(seen, healthy=healthy, draining=self.world.draining)


def _choices(origin: Mapping[Device, Sequence[Store]]) -> list[dict[Device, Store]]:
    """Return mappings that together name every store once per device."""
    depth = max((len(stores) for stores in origin.values()), default=0)
    return [{d: stores[i] for d, stores in origin.items() if i < len(stores)} for i in range(depth)]


def _holds(store: Store | None, route: Route) -> bool:
    if store is None or route.tensor not in store.shard:
        return False
    held = store.shard[route.tensor]
    return held.intersect(route.box) == route.box
