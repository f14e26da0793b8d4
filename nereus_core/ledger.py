"""Ledger: what every adapter does around a primitive, whatever its framework.

An adapter has one and hands it each primitive together with the function that performs it. The
ledger refuses what may not run now, keeps primitives on common devices apart, tells who watches of
each phase, writes the receipt, and gives it again when the same primitive comes again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from nereus_core.adapter import Fingerprint, Receipt
from nereus_core.capabilities import Capabilities, Feature
from nereus_core.cluster import Device
from nereus_core.errors import (
    DevicesBusy,
    Diverged,
    Infeasible,
    LayoutError,
    NotAtBoundary,
    PrimitiveError,
    UnitLost,
    Unsupported,
)
from nereus_core.layout import stage_problems
from nereus_core.phases import Enter, Phase, PhaseHook
from nereus_core.primitives import (
    Extend,
    Merge,
    OpId,
    Primitive,
    acquired,
    check,
    created,
    ended,
    kind_of,
    model_stage_of,
    released,
    sources,
    touched,
)
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import Job, ModelStage

Fault = Callable[[Primitive, Phase, UnitMap], None]
"""Told of a primitive, a phase and the units that can be read; may break something, or raise."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a job stands at the moment a primitive is asked for."""

    job: Job
    alive: UnitMap
    held: frozenset[ModelStage] | None
    """Stages that the open boundary holds; None outside one: `Gate.held`."""
    inside: Collection[ModelStage] = ()
    """Stages that run now, whose state must not be read: `Gate.inside`."""
    parked: UnitMap = field(default_factory=UnitMap)
    """Units whose shards a parking Destroy kept in host memory."""
    lost: Collection[UnitId] = ()
    """Units that a failed device has taken."""

    @property
    def readable(self) -> UnitMap:
        """Units that state can be read from: alive or parked."""
        return self.alive.replace(self.parked, self.parked.values())


@dataclass(frozen=True, slots=True)
class Done:
    """What the framework did for one primitive, as the adapter saw it."""

    moved_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: Mapping[Device, int] = field(default_factory=dict)
    """Most state bytes resident at once per device that took part; empty where not measured."""


class Ledger:
    """The primitives an adapter has performed and those in progress. Safe to share by threads.

    Args:
        capabilities: what the adapter declares; all else is refused.
        backend_version: version of the framework, for capabilities that depend on it.
        clock: seconds, for `Receipt.elapsed_s`.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        backend_version: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._capabilities, self._version, self._clock = capabilities, backend_version, clock
        self._lock = threading.RLock()
        self._receipts: dict[OpId, tuple[Primitive, Receipt]] = {}
        self._at_work: dict[OpId, frozenset[Device]] = {}
        self._on_phase: PhaseHook | None = None

    def watch(self, on_phase: PhaseHook | None) -> None:
        """Tell ``on_phase`` as each phase begins; behind `Adapter.watch`."""
        self._on_phase = on_phase

    def perform(
        self,
        op: Primitive,
        standing: Callable[[], Standing],
        do: Callable[[Primitive, UnitMap, Enter], Done],
        fault: Fault | None = None,
    ) -> Receipt:
        """Perform a primitive once.

        Args:
            op: The primitive.
            standing: Says how the job stands; not called when ``op`` has its receipt already.
            do: Does it, given the units that state can be read from, and says ``enter(phase)`` as
                each phase begins. What it raises leaves no receipt, so that the same op may be
                tried again.
            fault: Told of each phase after whoever watches.

        Raises:
            Unsupported: not declared.
            NotAtBoundary: no open boundary holds its stage, or a stage it reads runs.
            UnitLost: a unit it names is gone with a device.
            DevicesBusy: another primitive is at work on one of its devices.
            Infeasible: a device has failed, or the model does not allow the layout.
            PrimitiveError: the id belongs to another primitive, or what `primitives.check` raises.
        """
        with self._lock:
            if op.op_id in self._receipts:
                before, receipt = self._receipts[op.op_id]
                if before != op:
                    raise PrimitiveError(
                        f"op id {op.op_id!r} was used for {before}; {op} needs its own.", op
                    )
                return receipt
            self._require_capability(op)
            now = standing()
            units = now.readable
            _admit(op, now)
            self._require_free(op, touched(op, units))
            self._at_work[op.op_id] = touched(op, units)
        late: list[BaseException] = []

        def struck(op: Primitive, phase: Phase) -> None:
            if fault is not None:
                fault(op, phase, units)

        def enter(phase: Phase) -> None:
            for told in (self._on_phase, struck):
                try:
                    if told is not None:
                        told(op, phase)
                except BaseException as error:
                    if phase.may_abort:
                        raise
                    late.append(error)

        try:
            start_s = self._clock()
            done = do(op, units, enter)
            receipt = Receipt(
                op_id=op.op_id,
                created=created(op),
                ended=ended(op),
                acquired=acquired(op, units),
                released=released(op, units),
                moved_bytes=done.moved_bytes,
                kept_bytes=done.kept_bytes,
                elapsed_s=self._clock() - start_s,
                peak_bytes=done.peak_bytes,
            )
            with self._lock:
                self._receipts[op.op_id] = (op, receipt)
            if late:  # units have changed: the receipt had to be written first
                raise late[0]
            return receipt
        except PrimitiveError as error:
            error.op = error.op or op
            raise
        finally:
            with self._lock:
                del self._at_work[op.op_id]

    def _require_capability(self, op: Primitive) -> None:
        support = self._capabilities.of(kind_of(op), model_stage_of(op).stage)
        if support is None or not support.at(self._version):
            raise Unsupported(str(op), support.reason if support else "undeclared", op)
        stages = self._capabilities.features.get(Feature.PIPELINE_STAGES)
        if stages and not stages.at(self._version) and any(u.layout.pp > 1 for u in created(op)):
            raise Unsupported(str(op), stages.reason, op)

    def _require_free(self, op: Primitive, mine: frozenset[Device]) -> None:
        holders = [
            (device, f"{other} (in progress)")
            for other, devices in self._at_work.items()
            for device in sorted(mine & devices)
        ]
        if holders:
            raise DevicesBusy(str(op), holders, op)


def _admit(op: Primitive, now: Standing) -> None:
    """Raise unless the primitive may run on a job that stands so."""
    stage, failed = model_stage_of(op), now.job.cluster.failed
    if now.held is None or stage not in now.held:
        raise NotAtBoundary(str(op), op)
    if running := sorted({u.model_stage for u in sources(op)}.intersection(now.inside)):
        raise NotAtBoundary(f"{op} reads {running[0]}, which runs; it is", op)
    known = now.readable.intact(failed)
    named = (u for u in (*ended(op), *sources(op)) if u not in known)
    if lost := [u for u in named if u in now.lost or u in now.parked]:
        raise UnitLost(lost, tuple(now.alive), "a device failed")
    check(op, now.alive, now.parked)
    if isinstance(op, Extend) and not op.sources and not now.job.workload.node(stage).origin:
        raise Infeasible(f"{op}: {stage} has no origin; name units to read.", op)
    for unit in created(op):
        if dead := sorted(set(unit.devices) & failed):
            raise Infeasible(f"{op}: {dead[0]} has failed.", op)
        if problems := stage_problems(now.job, stage, unit.layout):
            error = LayoutError(unit.layout, now.job.model(stage).name, problems)
            raise Infeasible(f"{op}: {error}", op) from error


def require_identical(op: Merge, fingerprint: Callable[[UnitId], Fingerprint]) -> None:
    """Raise Diverged unless all parents hold the same tensors and counters."""
    first = fingerprint(op.parents[0])
    for other in map(fingerprint, op.parents[1:]):
        for tensor, digest in first.tensors.items():
            if other.tensors[tensor] != digest:
                raise Diverged(op.parents, tensor, op)
        for counter, value in first.steps.items():
            if other.steps[counter] != value:
                raise Diverged(op.parents, counter, op)
