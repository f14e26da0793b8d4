"""RolloutAdapter: the four primitives on the generate stage of a RolloutJob, whatever its engine.

A seat holds one rank, so a unit that takes over the devices of another is started when that one has
ended. Its weights are not with the units: they wait in shared memory, checked before anything ends.
Should the new unit not come up, the old one is built again from the same version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from nereus_adapters.rollout.fleet import raise_first, together
from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.rollout.ports import Engine
from nereus_adapters.rollout.segment import Segment
from nereus_adapters.rollout.weights import Published
from nereus_core.adapter import Boundary, Fingerprint
from nereus_core.capabilities import Capabilities, Feature
from nereus_core.errors import (
    Diverged,
    NereusError,
    OutOfDeviceMemory,
    UnitLost,
    Unsupported,
)
from nereus_core.ledger import Done, Ledger, Standing
from nereus_core.ledger_adapter import LedgerAdapter, require_plan
from nereus_core.observation import Observation
from nereus_core.phases import Enter, Phase
from nereus_core.plan import Plan
from nereus_core.primitives import (
    Destroy,
    Extend,
    Merge,
    Primitive,
    Split,
    created,
    ended,
    sources,
)
from nereus_core.state import placed, shard_bytes
from nereus_core.traffic import primitive_bytes
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage


class RolloutAdapter(LedgerAdapter):
    """Implements `nereus_core.adapter.Adapter`.

    Args:
        name: of the adapter.
        capabilities: what it declares.
        running: the job.
        version: of the engine, for capabilities that depend on it.
    """

    def __init__(
        self, name: str, capabilities: Capabilities, running: RolloutJob, version: str | None
    ) -> None:
        super().__init__(Ledger(capabilities, backend_version=version))
        self.name = name
        self._capabilities, self._running = capabilities, running

    # --- Reading ----------------------------------------------------------------------------------

    def job(self) -> Job:
        """Static facts; failed devices are marked."""
        return self._running.job

    def units(self) -> UnitMap:
        """Units alive."""
        return self._running.units

    def observe(self) -> Observation:
        """Drain what was seen since the last call."""
        return self._running.observe()

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        """Refuse: what an engine holds is in its kernels' form."""
        support = self._capabilities.features[Feature.FINGERPRINT]
        raise Unsupported("fingerprint", support.reason)

    # --- Boundary ---------------------------------------------------------------------------------

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        """Hold stages at the safe boundary; on leaving, prompts go to the units alive."""
        running = self._running
        held = running.gate.close_on(stages, timeout_s)
        try:
            yield Boundary(held, running.steps)
        finally:
            with suppress(NereusError):  # what it is, the next step says
                running.link()
            running.gate.open()

    def relink(self, plan: Plan) -> None:
        """Route to the plan's units; raises PlanError when they are not the ones alive."""
        running = self._running
        require_plan(plan, running.job, running.units)
        running.link()

    # --- Primitives -------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        running = self._running
        return Standing(
            job=running.job,
            alive=running.units,
            held=running.gate.held,
            inside=running.gate.inside,
            parked=UnitMap(running.parked.values()),
            lost=running.lost,
        )

    def _do(self, op: Primitive, units: UnitMap, enter: Enter) -> Done:
        running = self._running
        moved, kept = primitive_bytes(op, units, running.job)
        enter(Phase.PREPARE)
        running.settled(ended(op))
        if isinstance(op, Destroy):
            self._destroy(op, units[op.unit], enter)
            return Done(0, 0)
        version = self._version(op)
        self._require_memory(op, units)
        if isinstance(op, Extend):
            self._extend(op, version, enter)
        else:
            self._swap(op, tuple(units[u] for u in ended(op)), version, enter)
        return Done(moved, kept)

    def _version(self, op: Primitive) -> int:
        """Return the version that the new units are to serve: that of their sources."""
        running = self._running
        found = {u: running.version_of(u) for u in sources(op)}
        if isinstance(op, Extend):
            version = max(found.values())
            running.ensure(version)
            return version
        if len(set(found.values())) > 1:
            raise Diverged(sources(op), "the version of their weights", op)
        return next(iter(found.values()))

    def _extend(self, op: Extend, version: int, enter: Enter) -> None:
        running = self._running
        engine: Engine | None = None
        try:
            engine = running.build(op.unit)
            enter(Phase.TRANSFER)
            running.load(engine, version)
            enter(Phase.VERIFY)  # the engine has checked every cell's digest
            enter(Phase.COMMIT)
            self._require_alive(op.unit)
        except BaseException as error:
            if engine is not None:
                engine.close()
            self._raise_lost(op, error)
            raise
        running.admit(op.unit, engine)
        enter(Phase.RELEASE)

    def _destroy(self, op: Destroy, unit: Unit, enter: Enter) -> None:
        running = self._running
        for phase in (Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT):
            enter(phase)
        if op.park:
            running.park(unit)
        running.dismiss(op.unit)
        enter(Phase.RELEASE)

    def _swap(self, op: Split | Merge, old: tuple[Unit, ...], version: int, enter: Enter) -> None:
        """End units and start others on their devices, or build the old ones again."""
        running = self._running
        new = created(op)
        try:
            enter(Phase.TRANSFER)
            enter(Phase.VERIFY)
            check(running.store.get(version))
            enter(Phase.COMMIT)
            for unit in (*old, *new):
                self._require_alive(unit)
        except BaseException as error:
            self._raise_lost(op, error)
            raise
        for unit in old:
            running.dismiss(unit.id)
        engines: dict[UnitId, Engine] = {}
        try:
            self._begin(new, version, engines)
            for unit in new:
                self._require_alive(unit)
        except BaseException as error:
            self._back(old, version, engines)
            self._raise_lost(op, error)
            raise
        for unit in new:
            running.admit(unit, engines[unit.id])
        enter(Phase.RELEASE)

    def _begin(self, units: tuple[Unit, ...], version: int, into: dict[UnitId, Engine]) -> None:
        """Start engines, all at once, with their weights."""

        def begin(unit: Unit) -> None:
            into[unit.id] = self._running.build(unit)
            self._running.load(into[unit.id], version)

        raise_first(together([lambda unit=unit: begin(unit) for unit in units]))  # type: ignore[misc]

    def _back(self, old: tuple[Unit, ...], version: int, new: dict[UnitId, Engine]) -> None:
        """Build the old units again, as far as their devices are healthy."""
        for engine in new.values():
            engine.close()
        failed = self._running.job.cluster.failed
        intact = tuple(u for u in old if failed.isdisjoint(u.devices))
        engines: dict[UnitId, Engine] = {}
        self._begin(intact, version, engines)
        for unit in intact:
            self._running.admit(unit, engines[unit.id])

    def _require_alive(self, unit: Unit) -> None:
        failed = self._running.job.cluster.failed
        if not failed.isdisjoint(unit.devices):
            raise UnitLost([unit.id], tuple(self.units()), "a device failed")

    def _raise_lost(self, op: Primitive, error: BaseException) -> None:
        """Turn an error into UnitLost when a unit of the primitive went with its device."""
        if lost := [u for u in (*ended(op), *sources(op)) if u in self._running.lost]:
            raise UnitLost(lost, tuple(self.units()), str(error)) from error

    def _require_memory(self, op: Primitive, units: UnitMap) -> None:
        """Raise OutOfDeviceMemory unless new shards fit on the devices, beside other stages'."""
        job, gone = self.job(), set(ended(op))
        have = job.cluster.device_spec.memory_bytes
        others = [u for u in self.units().values() if u.id not in gone]
        for unit in created(op):
            for device, need in _bytes(job, unit).items():
                total = need + sum(_bytes(job, u).get(device, 0) for u in others)
                if total > have:
                    raise OutOfDeviceMemory(str(op), device, total, have)


def check(published: Published) -> None:
    """Raise GarbledWeights when published weights have changed in shared memory."""
    segments: dict[str, Segment] = {}
    try:
        for piece in published.pieces:
            if piece.segment not in segments:
                segments[piece.segment] = Segment.open(piece.segment)
            with segments[piece.segment].view(piece.offset, piece.num_bytes) as content:
                piece.check(content, published.version)
    finally:
        for segment in segments.values():
            segment.close()


def _bytes(job: Job, unit: Unit) -> dict[object, int]:
    model, stage = job.model(unit.model_stage), unit.model_stage.stage
    return {
        device: shard_bytes(shard, job.precision, stage)
        for device, shard in placed(model, unit.layout, unit.devices)
    }
