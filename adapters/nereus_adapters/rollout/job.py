"""RolloutJob: the generate stage of a running RL job, on engines; the handle of its adapter.

The other stages are somebody else's: the trainer says where their units are, and publishes weights.
The job knows units, versions and devices, and no primitive.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future

from nereus_adapters.rollout.figures import StepFigures, figures_of
from nereus_adapters.rollout.fleet import Fleet, raise_first, together
from nereus_adapters.rollout.ports import (
    Completion,
    Engine,
    EngineError,
    EngineFactory,
    EngineLost,
    EngineSignals,
    Prompt,
)
from nereus_adapters.rollout.source import Trainer
from nereus_adapters.rollout.store import Store
from nereus_adapters.rollout.weights import GarbledWeights, Published
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, UnitLost, WaitTimeout
from nereus_core.gate import Gate
from nereus_core.observation import Observation, TokenStats, clip_ratio
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
        self.store = Store()
        self.fleet = Fleet(wait_s=wait_s)
        self.fleet.on_lost = self._rebuild_soon
        self._wait_s = wait_s
        self._lock = threading.RLock()
        self._units: dict[UnitId, Unit] = {}
        self._rebuilds: dict[UnitId, Future[None]] = {}
        self._rebuilding = threading.Lock()
        self._failed: frozenset[Device] = job.cluster.failed
        self._unheard: list[UnitId] = []
        self.lost: set[UnitId] = set()
        """Units that went with a device, ever."""
        self.parked: dict[UnitId, Unit] = {}
        self.rebuilt = 0
        """Engines that were rebuilt because they failed."""
        self.steps = 0
        self._figures: StepFigures | None = None
        self._lengths: list[tuple[int, int]] = []
        self._signals: dict[UnitId, EngineSignals] = {}
        self._publishing = threading.Lock()
        self.ensure(trainer.version)
        self._start(plan, list(engines))

    def _start(self, plan: Plan, left: list[Engine]) -> None:
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
        for engine in left:
            engine.close()
        version = self.trainer.version

        def begin(unit: Unit) -> None:
            engine = found.get(unit.id) or self.build(unit)
            found[unit.id] = engine
            self.load(engine, version)

        raise_first(together([lambda unit=unit: begin(unit) for unit in wanted]))  # type: ignore[misc]
        for unit in wanted:
            self.admit(unit, found[unit.id])
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
        with self._lock:
            figures, self._figures = self._figures, None
            lengths, self._lengths = self._lengths, []
            signals, self._signals = self._signals, {}
        peaks = dict(self.trainer.take_peaks())
        for seen in signals.values():
            for device, peak in seen.peak_bytes.items():
                peaks[device] = peaks.get(device, 0) + peak
        responses = [n for _, n in lengths]
        return Observation(
            step=self.steps - 1,
            step_s=figures.step_s if figures else 0.0,
            stage_s=dict(figures.stage_s) if figures else {},
            prompt_tokens=TokenStats.of([n for n, _ in lengths]),
            response_tokens=TokenStats.of(responses),
            peak_bytes=peaks,
            healthy=frozenset(self.job.cluster.healthy),
            metrics={**(figures.metrics if figures else {}), **figures_of(signals)},
            clip_ratio=clip_ratio(responses, self._job.max_response_tokens),
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
        with self._lock:
            self._lengths += [
                (len(p.tokens), len(c.tokens)) for p, c in zip(prompts, found, strict=True)
            ]

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
        self.ensure(version)

        def bring(unit: UnitId) -> None:
            engine = self.fleet.engine(unit)
            if engine.version == version:
                return
            try:
                self.load(engine, version)
            except (EngineError, EngineLost, WaitTimeout):
                self.rebuild(unit, engine, version)

        units = [u.id for u in self.units.of(ACTOR_GENERATE)]
        raise_first(together([lambda unit=unit: bring(unit) for unit in units]))  # type: ignore[misc]
        self.fleet.serve_version(version)
        self._prune()

    def stepped(self, figures: StepFigures) -> None:
        """Count a step, and ask engines what they have seen in it."""
        signals = self.fleet.signals()
        with self._lock:
            self.steps += 1
            self._figures, self._signals = figures, signals

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

    def load(self, engine: Engine, version: int) -> None:
        """Give an engine a version that is in the store; published once more if it is garbled."""
        published = self.store.get(version)
        try:
            engine.update_weights(version, published.manifest(engine.layout))
        except GarbledWeights:
            if version != self.trainer.version:
                raise
            with self._publishing:
                if self.store.get(version) is published:  # nobody has done it meanwhile
                    self.trainer.publish(self.store)
            engine.update_weights(version, self.store.get(version).manifest(engine.layout))

    def ensure(self, version: int) -> None:
        """Have a version in the store: the trainer's newest is published where it is not."""
        with self._publishing:
            if version == self.trainer.version and version not in self.store:
                self.trainer.publish(self.store)

    def given(self, unit: UnitId) -> Published:
        """Return the weights that a unit serves, as they were published; it has checked them."""
        return self.store.get(self.version_of(unit))

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

    def admit(self, unit: Unit, engine: Engine) -> None:
        """Let a unit take part; it is routed to after `link`."""
        with self._lock:
            self._units[unit.id] = unit
        self.fleet.add(unit.id, engine)

    def dismiss(self, unit: UnitId) -> None:
        """End a unit: what it was doing goes on elsewhere, its devices are free."""
        self.settled([unit])
        self.fleet.remove(unit).close()
        with self._lock:
            del self._units[unit]

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

    def settled(self, units: Iterable[UnitId]) -> None:
        """Wait for rebuilds of units that are under way."""
        for unit in units:
            with self._lock:
                under_way = self._rebuilds.get(unit)
            if under_way is not None:
                try:
                    under_way.exception(self._wait_s)
                except TimeoutError:
                    raise WaitTimeout(f"the rebuilding of {unit}", self._wait_s) from None

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
        for unit in gone:
            if unit.model_stage == ACTOR_GENERATE:
                self.fleet.remove(unit).close()
                with self._lock:
                    del self._units[unit]

    def reap(self) -> tuple[UnitId, ...]:
        """End engines on devices that the trainer knows to be gone; return their units."""
        failed = self.failed
        with self._lock:
            gone = tuple(u.id for u in self._units.values() if not failed.isdisjoint(u.devices))
            for unit in gone:
                del self._units[unit]
            self.lost.update(gone)
        for unit in gone:
            self.fleet.remove(unit).close()
        return gone

    def rebuild(self, unit: UnitId, failed: Engine, version: int) -> None:
        """Put a new engine in the place of one that failed, on the same devices, once."""
        with self._rebuilding:
            with self._lock:
                wanted = self._units[unit]
            engine = self.fleet.engine(unit)
            if engine is not failed:  # somebody else has noticed too, and done it
                if engine.version != version:
                    self.load(engine, version)
                return
            failed.close()
            engine = self.build(wanted)
            try:
                self.load(engine, version)
            except NereusError:
                engine.close()
                raise
            self.fleet.replace(unit, engine)
            self.rebuilt += 1

    def _rebuild_soon(self, unit: UnitId) -> None:
        """Rebuild a lost engine on a thread of its own, once."""
        with self._lock:
            known = self._units.get(unit)
            if (
                known is None
                or unit in self._rebuilds
                or not self.failed.isdisjoint(known.devices)
                or (failed := self.fleet.engine(unit)).alive
            ):
                return
            done: Future[None] = Future()
            self._rebuilds[unit] = done

        def run() -> None:
            try:
                assert self.fleet.version is not None
                self.rebuild(unit, failed, self.fleet.version)
            except Exception as error:
                with self._lock:
                    self._units.pop(unit, None)
                    self._unheard.append(unit)
                    self.lost.add(unit)
                self.fleet.remove(unit).close()
                done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                with self._lock:
                    del self._rebuilds[unit]

        threading.Thread(target=run, name=f"nereus rebuild {unit}", daemon=True).start()

    def _prune(self) -> None:
        """Forget versions that no unit holds."""
        held = {e.version for e in self.fleet.engines().values()}
        wanted = {v for v in (*held, self.fleet.version, self.trainer.version) if v is not None}
        with self._lock:
            if not self.parked and not self._rebuilds:
                self.store.keep(wanted)

    def release(self) -> list[Engine]:
        """Let go of the engines, which are handed to a job after this one, and of the weights."""
        self.fleet.interrupt()
        units = list(self.fleet.engines())
        engines = [self.fleet.remove(unit) for unit in units]
        self.store.close()
        return engines

    def close(self) -> None:
        """End all engines."""
        raise_first(together([engine.close for engine in self.release()]))
