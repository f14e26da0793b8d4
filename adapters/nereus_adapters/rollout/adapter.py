"""RolloutAdapter: the four primitives on the generate stage of a RolloutJob, whatever its engine.

Weights are not with the units: they wait in shared memory, so that a new unit depends on no other.
`swapping` says how units take over the devices of others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.rollout.ports import Engine
from nereus_adapters.rollout.swapping import Swap
from nereus_core.adapter import Boundary, Fingerprint
from nereus_core.capabilities import Capabilities, Feature
from nereus_core.errors import (
    Diverged,
    Infeasible,
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
        for unit in created(op):
            if problem := running.factory.problem(unit.layout, unit.devices):
                raise Infeasible(f"{op}: {problem}.", op)
        moved, kept = primitive_bytes(op, units, running.job)
        enter(Phase.PREPARE)
        running.rebuilds.settled(ended(op))
        if isinstance(op, Destroy):
            self._destroy(op, units[op.unit], enter)
            return Done(0, 0)
        version = self._version(op)
        self._require_memory(op)
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
            running.supply.ensure(version)
            return version
        if len(set(found.values())) > 1:
            raise Diverged(sources(op), "the version of their weights", op)
        version = next(iter(found.values()))
        running.supply.ensure(version)
        return version

    def _extend(self, op: Extend, version: int, enter: Enter) -> None:
        running = self._running
        engine: Engine | None = None
        try:
            engine = running.build(op.unit)
            enter(Phase.TRANSFER)
            running.supply.load(engine, version)
            enter(Phase.VERIFY)  # the engine has checked every cell's digest
            enter(Phase.COMMIT)
            self._require_alive(op.unit)
        except BaseException as error:
            if engine is not None:
                engine.close()
            self._raise_lost(op, error)
            raise
        running.exchange((), {op.unit: engine})
        enter(Phase.RELEASE)

    def _destroy(self, op: Destroy, unit: Unit, enter: Enter) -> None:
        running = self._running
        for phase in (Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT):
            enter(phase)
        if op.park:
            running.park(unit)
        running.exchange([op.unit], {})
        enter(Phase.RELEASE)

    def _swap(self, op: Split | Merge, old: tuple[Unit, ...], version: int, enter: Enter) -> None:
        """Put units in the place of others, on their devices."""
        swap = Swap(self._running, old, created(op), version)
        beside = self._running.factory.beside and self._shortage(op, ()) is None
        try:
            (swap.beside if beside else swap.instead)(enter, self._require_alive)
        except BaseException as error:
            self._raise_lost(op, error)
            raise
        enter(Phase.RELEASE)

    def _require_alive(self, unit: Unit) -> None:
        failed = self._running.job.cluster.failed
        if not failed.isdisjoint(unit.devices):
            raise UnitLost([unit.id], tuple(self.units()), "a device failed")

    def _raise_lost(self, op: Primitive, error: BaseException) -> None:
        """Turn an error into UnitLost when a unit of the primitive went with its device."""
        if lost := [u for u in (*ended(op), *sources(op)) if u in self._running.lost]:
            raise UnitLost(lost, tuple(self.units()), str(error)) from error

    def _require_memory(self, op: Primitive) -> None:
        """Raise OutOfDeviceMemory unless new shards fit on the devices, beside other stages'."""
        if error := self._shortage(op, ended(op)):
            raise error

    def _shortage(self, op: Primitive, gone: Collection[UnitId]) -> OutOfDeviceMemory | None:
        """Return the error of new shards that do not fit, should some units be gone by then."""
        job = self.job()
        have = job.cluster.device_spec.memory_bytes
        others = [u for u in self.units().values() if u.id not in gone]
        for unit in created(op):
            for device, need in _bytes(job, unit).items():
                total = need + sum(_bytes(job, u).get(device, 0) for u in others)
                if total > have:
                    return OutOfDeviceMemory(str(op), device, total, have)
        return None


def _bytes(job: Job, unit: Unit) -> dict[object, int]:
    model, stage = job.model(unit.model_stage), unit.model_stage.stage
    return {
        device: shard_bytes(shard, job.precision, stage)
        for device, shard in placed(model, unit.layout, unit.devices)
    }
