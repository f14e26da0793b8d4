"""RolloutJob: the generate stage of a running RL job, on engines; the handle of its adapter.

The other stages are somebody else's: the trainer says where their units are, and publishes weights.
The job knows units, versions and devices, and no primitive.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from nereus_adapters.rollout.figures import Seen, StepFigures
from nereus_adapters.rollout.fleet import Fleet, raise_first, together
from nereus_adapters.rollout.ports import Completion, Engine, EngineError, EngineFactory, Prompt
from nereus_adapters.rollout.rebuilding import Rebuilds
from nereus_adapters.rollout.source import Trainer
from nereus_adapters.rollout.supply import Supply
from nereus_adapters.rollout.weights import Published
from nereus_core.cluster import Device
from nereus_core.errors import UnitLost, WaitTimeout
from nereus_core.gate import Gate
from nereus_core.observation import Observation
from nereus_core.plan import Plan, check_plan
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, Job


class RolloutJob:
    """Thread-safe. Methods that change units are called at a boundary; reads may come any time.

    Args:
        job: static facts.
        plan: where it runs at first; units of generate are started here, with the newest weights.
        factory: makes engines.
        trainer: the rest of the job.
        engines: of a job before, to go on with where unit and devices are the same.
        gate: of the job that this stage belongs to, where it has one.
        wait_s: longest wait for a response or a boundary.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        factory: EngineFactory,
        trainer: Trainer,
        *,
        engines: Collection[Engine] = (),
        gate: Gate | None = None,
        wait_s: float = 600.0,
    ) -> None:
        check_plan(plan, job)
        self._job, self.factory, self.trainer = job, factory, trainer
        self.gate = gate or Gate(wait_s, asynchronous=job.workload.asynchronous)
        self.supply = Supply(trainer, factory.hosts)
        self.fleet = Fleet(wait_s=wait_s)
        self._lock = threading.RLock()
        self._units: dict[UnitId, Unit] = {}
        self.rebuilds = Rebuilds(
            self.fleet, self._unit, self.start, self.supply.load, self.lose, wait_s
        )
        self.fleet.on_lost = self.rebuilds.soon
        self._failed: frozenset[Device] = job.cluster.failed
        self._unheard: list[UnitId] = []
        self.lost: set[UnitId] = set()
        """Units that went with a device, ever."""
        self.parked: dict[UnitId, Unit] = {}
        self.steps = 0
        self._seen = Seen()
        self.supply.ensure(trainer.version)
        self._begin(plan, list(engines))

    def _begin(self, plan: Plan, left: list[Engine]) -> None:
        placement = plan[ACTOR_GENERATE]
        wanted = [
            Unit(UnitId(ACTOR_GENERATE, serial), placement.layout, devices)
            for serial, devices in enumerate(placement.units)
        ]
        found: dict[UnitId, Engine] = {}
        for unit in wanted:
            same = [e for e in left if (e.layout, e.devices) == (unit.layout, unit.devices)]
            if same and same[0].alive:
                found[unit.id] = same[0]
                left.remove(same[0])
        raise_first(together([engine.close for engine in left]))
        version = self.trainer.version

        def begin(unit: Unit) -> None:
            if unit.id in found:
                self.supply.load(found[unit.id], version)
            else:
                found[unit.id] = self.start(unit, version)

        raise_first(together([lambda unit=unit: begin(unit) for unit in wanted]))  # type: ignore[misc]
        self.exchange((), {unit: found[unit.id] for unit in wanted})
        self.fleet.serve_version(version)
        self.link()

    # --- Reading ----------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """Static facts, on the cluster as it is now."""
        return self._job.on(self._job.cluster.without(self.failed))

    @property
    def failed(self) -> frozenset[Device]:
        """Devices that are gone."""
        return self._failed | self.trainer.failed

    @property
    def units(self) -> UnitMap:
        """Units alive, those of other stages too. An engine that is being rebuilt is alive: its
        weights are in the store.
        """  # noqa: D205  (two sentences that belong together)
        failed = self.failed
        with self._lock:
            mine = [u for u in self._units.values() if failed.isdisjoint(u.devices)]
        return UnitMap([*mine, *self.trainer.units.values()])

    def observe(self) -> Observation:
        """Return what was seen since the last call; touches no engine."""
        return self._seen.take(
            self.steps - 1, self.job, self.trainer.take_peaks(), self._job.max_response_tokens
        )

    # --- Steps ------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Respond to prompts with the weights of the fleet's version.

        Raises:
            UnitLost: a unit went with a device since the last call, or none is left.
        """
        self.heard()
        found = self.fleet.generate(prompts)
        self.note(prompts, found)
        return found

    def note(self, prompts: Sequence[Prompt], found: Sequence[Completion]) -> None:
        """Keep the lengths of responses that came in another way than by `generate`."""
        self._seen.note(
            [(len(p.tokens), len(c.tokens)) for p, c in zip(prompts, found, strict=True)]
        )

    def sync(self) -> None:
        """Bring every engine to the trainer's newest weights; it returns when all serve them.

        A digest that differs is published once more. An engine that fails is rebuilt, while the
        others serve.

        Raises:
            GarbledWeights: a digest differed twice.
            EngineError: an engine could not even be rebuilt.
        """
        version = self.trainer.version
        if self.fleet.version == version and all(
            e.version == version for e in self.fleet.engines().values()
        ):
            return
        self.supply.ensure(version)
        self.supply.deliver(version, self.fleet.engines().values())
        self.rebuilds.bring(self.units.of(ACTOR_GENERATE), version)
        self.fleet.serve_version(version)
        self._prune()

    def stepped(self, figures: StepFigures) -> None:
        """Count a step, and ask engines what they have seen in it."""
        self._seen.stepped(figures, self.fleet.signals())
        self.steps += 1

    def heard(self) -> None:
        """Raise UnitLost, once, for units that went since the last call, or when none is left."""
        with self._lock:
            gone, self._unheard = self._unheard, []
        units = self.units
        if gone or not units.of(ACTOR_GENERATE):
            raise UnitLost(gone or [ACTOR_GENERATE], tuple(units), "a device failed")

    # --- Units ------------------------------------------------------------------------------------

    def build(self, unit: Unit) -> Engine:
        """Start an engine for a unit; it has no weights and takes no part yet."""
        return self.factory.create(str(unit.id), unit.layout, unit.devices)

    def start(self, unit: Unit, version: int) -> Engine:
        """Start an engine for a unit, with a version that is in the store."""
        engine = self.build(unit)
        try:
            self.supply.load(engine, version)
        except BaseException:
            engine.close()
            raise
        return engine

    def given(self, unit: UnitId) -> Published:
        """Return the weights that a unit serves, as they were published; it has checked them."""
        return self.supply.store.get(self.version_of(unit))

    def version_of(self, unit: UnitId) -> int:
        """Return the version that a unit serves, or that of the trainer for one of its units."""
        if unit.model_stage != ACTOR_GENERATE:
            return self.trainer.version
        with self._lock:
            parked = unit in self.parked
        version = None if parked else self.fleet.engine(unit).version
        # An engine that is being rebuilt gets the version that is served.
        found = self.fleet.version if version is None else version
        assert found is not None
        return found

    def exchange(self, old: Collection[UnitId], new: Mapping[Unit, Engine]) -> None:
        """Let units take the place of others, at once; then the others end, their devices are free.

        New units are routed to after `link`; what old ones were doing goes on elsewhere.
        """
        self.rebuilds.settled(old)
        with self._lock:
            for unit in old:
                del self._units[unit]
            for fresh, engine in new.items():
                self._units[fresh.id] = fresh
                self.fleet.add(fresh.id, engine)
        raise_first(together([lambda u=unit: self.fleet.remove(u).close() for unit in old]))  # type: ignore[misc]

    def park(self, unit: Unit) -> None:
        """Keep a unit's weights, in the store, until `link`."""
        with self._lock:
            self.parked[unit.id] = unit

    def link(self) -> None:
        """Route to the units alive; nothing is parked any more, losses count as heard."""
        with self._lock:
            self.parked.clear()
            self._unheard.clear()
        self.fleet.route(u.id for u in self.units.of(ACTOR_GENERATE))
        self._prune()

    # --- Failures ---------------------------------------------------------------------------------

    def fail(self, device: Device) -> None:
        """Lose a device: units on it are gone."""
        with self._lock:
            before = self.units
            self._failed |= {device}
            gone = [u for u in before if device in before[u].devices]
            self._unheard += gone
            self.lost.update(gone)
        self.trainer.fail(device)
        self._end([u for u in gone if u.model_stage == ACTOR_GENERATE])

    def reap(self) -> tuple[UnitId, ...]:
        """End engines on devices that the trainer knows to be gone; return their units."""
        failed = self.failed
        with self._lock:
            gone = tuple(u.id for u in self._units.values() if not failed.isdisjoint(u.devices))
            self.lost.update(gone)
        self._end(gone)
        return gone

    def lose(self, unit: UnitId) -> None:
        """Give up a unit whose engine cannot be had again; the next step hears of it."""
        with self._lock:
            self._unheard.append(unit)
            self.lost.add(unit)
        self._end([unit])

    def _end(self, units: Collection[UnitId]) -> None:
        """End units' engines without leave-taking."""
        with self._lock:
            mine = [unit for unit in units if self._units.pop(unit, None) is not None]
        raise_first(together([lambda u=unit: self.fleet.remove(u).close() for unit in mine]))  # type: ignore[misc]

    def _unit(self, unit: UnitId) -> Unit | None:
        """Return a unit that is to have an engine."""
        with self._lock:
            found = self._units.get(unit)
        return found if found is not None and self.failed.isdisjoint(found.devices) else None

    def _prune(self) -> None:
        """Forget versions that no unit holds."""
        rebuilding = self.rebuilds.under_way
        held = {e.version for e in self.fleet.engines().values()}
        wanted = {v for v in (*held, self.fleet.version, self.trainer.version) if v is not None}
        with self._lock:
            if not self.parked and not rebuilding:
                self.supply.store.keep(wanted)

    def release(self) -> list[Engine]:
        """Let go of the engines, which are handed to a job after this one, and of the weights."""
        with suppress(WaitTimeout, EngineError):  # whoever ends a bad engine hears of it
            self.fleet.interrupt()
        units = list(self.fleet.engines())
        engines = [self.fleet.remove(unit) for unit in units]
        self.supply.store.close()
        return engines

    def close(self) -> None:
        """End all engines."""
        raise_first(together([engine.close for engine in self.release()]))
