"""TorchAdapter: the four primitives over a TorchJob."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from nereus_adapters.rollout.adapter import RolloutAdapter
from nereus_adapters.torch import CAPABILITIES
from nereus_adapters.torch.alike import require_alike
from nereus_adapters.torch.engine import combine
from nereus_adapters.torch.engines import published_digests
from nereus_adapters.torch.job import TorchJob
from nereus_adapters.torch.move import Move
from nereus_adapters.torch.sync import TORN
from nereus_core.adapter import Boundary, Fingerprint, Receipt
from nereus_core.cluster import Device
from nereus_core.errors import (
    Infeasible,
    NereusError,
    OutOfDeviceMemory,
    PrimitiveError,
    SeatDead,
    UnitLost,
    WaitTimeout,
)
from nereus_core.ledger import Done, Ledger, Standing, require_identical
from nereus_core.ledger_adapter import LedgerAdapter, alive, require_plan
from nereus_core.observation import Observation
from nereus_core.phases import Enter, Phase, PhaseHook
from nereus_core.plan import Plan
from nereus_core.primitives import (
    Destroy,
    Extend,
    Merge,
    Primitive,
    Split,
    created,
    ended,
    model_stage_of,
    sources,
)
from nereus_core.state import placed, shard_bytes
from nereus_core.traffic import primitive_bytes
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, Job, ModelStage, Stage


class TorchAdapter(LedgerAdapter):
    """Implements `nereus_core.adapter.Adapter`.

    Primitives on disjoint devices may run at once, from several threads.
    """

    name = "torch"

    def __init__(self, running: TorchJob) -> None:
        super().__init__(Ledger(CAPABILITIES))
        self._running = running
        self._lock = threading.Lock()
        self._known: dict[UnitId, Unit] = dict(running.units)
        self._engines = (
            RolloutAdapter(self.name, CAPABILITIES, running.engines, None)
            if running.engines is not None
            else None
        )

    # --- Reading ------------------------------------------------------------------------------

    def job(self) -> Job:
        """Static facts; failed devices are marked."""
        return self._running.job

    def units(self) -> UnitMap:
        """Units alive: all of whose seats answer."""
        return self._running.units

    def observe(self) -> Observation:
        """Drain what was seen since the last call."""
        return self._running.observe()

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        """Digest logical state where it lies; partial digests of the ranks add up.

        Of a rollout engine: the weights that it was given, whose digests it has checked.
        """
        engines = self._running.engines
        if engines is not None and unit.model_stage == ACTOR_GENERATE:
            counters = {"weight_version": engines.version_of(unit)}
            return Fingerprint(
                unit, published_digests(engines.given(unit), engines.factory.hosts), counters
            )
        fleet = self._running.fleet
        found = alive(unit, self.units())
        digests = fleet.settle(fleet.send({unit: {}}, "digests"), self._running.settings.transfer_s)
        counters = {k: int(v) for k, v in fleet.counters(found).items()}
        return Fingerprint(unit, combine([a.value for a in digests]), counters)

    # --- Boundary -----------------------------------------------------------------------------

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        """Hold stages at the safe boundary; on leaving, the job is linked for the units alive."""
        running = self._running
        held = running.gate.close_on(stages, timeout_s)
        try:
            yield Boundary(held, running.steps_done)
        finally:
            # What keeps the job from being linked now is raised by the next step, which links too.
            with suppress(NereusError):
                running.relink()
            running.gate.open()

    def relink(self, plan: Plan) -> None:
        """Rebuild groups and routing; raises PlanError when the units alive are not the plan's."""
        running = self._running
        require_plan(plan, running.job, running.units)
        running.relink()

    def watch(self, on_phase: PhaseHook | None) -> None:
        """Tell of phases."""
        super().watch(on_phase)
        if self._engines is not None:
            self._engines.watch(on_phase)

    # --- Primitives ---------------------------------------------------------------------------

    def perform(self, op: Primitive) -> Receipt:
        """Perform a primitive; that of a rollout engine, as the engines do."""
        if self._engines is not None and model_stage_of(op) == ACTOR_GENERATE:
            self._engines.fault = self.fault
            return self._engines.perform(op)
        receipt = super().perform(op)
        with self._lock:
            self._known.update({u.id: u for u in created(op)})
        return receipt

    def _standing(self) -> Standing:
        gate, job = self._running.gate, self.job()
        failed = job.cluster.failed
        with self._lock:
            lost = [i for i, u in self._known.items() if not failed.isdisjoint(u.devices)]
        return Standing(
            job=job,
            alive=self.units(),
            held=gate.held,
            inside=gate.inside,
            parked=UnitMap(self._running.fleet.parked.values()),
            lost=lost,
        )

    def _do(self, op: Primitive, readable: UnitMap, enter: Enter) -> Done:
        running = self._running
        enter(Phase.PREPARE)
        if isinstance(op, Destroy):
            self._destroy(op, readable[op.unit], enter)
            return Done()
        if isinstance(op, Extend) and not op.sources:
            return self._load(op, readable, enter)
        origin = tuple(readable[u] for u in sources(op))
        stage = model_stage_of(op).stage
        poorer = [u for u in sources(op) if u.model_stage.stage is not Stage.TRAIN]
        if stage is Stage.TRAIN and poorer:
            raise Infeasible(f"{op}: {poorer[0]} holds no optimizer state to copy.", op)
        if isinstance(op, Merge) and len(origin) > 1:
            if len({unit.layout for unit in origin}) == 1:
                require_alike(op, origin, running.fleet, running.settings.transfer_s)
            else:
                require_identical(op, self.fingerprint)
        counters = self._counters(op, origin)
        move = Move.plan(
            str(op.op_id),
            origin,
            tuple(readable[u] for u in ended(op)),
            created(op),
            running.item_bytes(stage),
            running.fleet,
            op.staging_bytes if isinstance(op, Split | Merge) else None,
        )
        self._require_memory(op, move)
        peaks = move.run(
            running.fleet,
            counters,
            running.settings.bucket_bytes,
            running.settings.transfer_s,
            enter,
        )
        return Done(move.moved_bytes, move.kept_bytes, peaks)

    def _load(self, op: Extend, readable: UnitMap, enter: Enter) -> Done:
        """Build a unit from the folder its model came from."""
        fleet, job = self._running.fleet, self.job()
        unit, stage = op.unit, op.unit.model_stage
        for device, shard in placed(job.model(stage), unit.layout, unit.devices):
            need = shard_bytes(shard, job.precision, stage.stage) + self._held_bytes(device, job)
            if need > job.cluster.device_spec.memory_bytes:
                have = job.cluster.device_spec.memory_bytes
                raise OutOfDeviceMemory(str(op), device, need, have)
        enter(Phase.TRANSFER)
        try:
            fleet.load([unit])
            enter(Phase.VERIFY)  # safetensors check what they read
            enter(Phase.COMMIT)
        except Exception as error:
            fleet.unload(unit)
            if lost := [u.id for u in fleet.reap()]:
                raise UnitLost(lost, tuple(fleet.units), str(error)) from error
            raise
        fleet.replace((), [unit])
        enter(Phase.RELEASE)
        return Done(*primitive_bytes(op, readable, job))

    def _destroy(self, op: Destroy, unit: Unit, enter: Enter) -> None:
        fleet = self._running.fleet
        for phase in (Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT):
            enter(phase)
        try:
            fleet.drop(unit, park=op.park)
        except (SeatDead, WaitTimeout) as error:
            lost = {u.id for u in fleet.reap()} & {op.unit}
            raise UnitLost(sorted(lost), tuple(fleet.units), str(error)) from error
        fleet.replace([op.unit], (), [unit] if op.park else ())
        enter(Phase.RELEASE)

    def _counters(self, op: Primitive, origin: tuple[Unit, ...]) -> dict[str, int | float]:
        """Return the counters of the new units: those of their source."""
        found = self._running.fleet.counters(origin[0])
        if found["weight_version"] == TORN:
            raise PrimitiveError(
                f"{op}: weights of {origin[0].id} are torn by a synchronisation that was cut "
                "short; run a step first.",
                op,
            )
        if model_stage_of(op).stage is not Stage.TRAIN:
            return {**found, "step": 0}
        return found

    def _require_memory(self, op: Primitive, move: Move) -> None:
        """Raise OutOfDeviceMemory unless new shards fit beside what the devices hold."""
        job = self.job()
        have = job.cluster.device_spec.memory_bytes
        for device, staged in sorted(move.fetched_bytes().items()):
            need = staged + self._held_bytes(device, job)
            if need > have:
                raise OutOfDeviceMemory(str(op), device, need, have)

    def _held_bytes(self, device: Device, job: Job) -> int:
        return sum(
            shard_bytes(shard, job.precision, unit.model_stage.stage)
            for unit in self.units().on(device)
            for where, shard in placed(job.model(unit.model_stage), unit.layout, unit.devices)
            if where == device
        )
