"""Subject: a launched job as a case sees it: the adapter to act on, the harness to look behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from nereus_conformance.ties import cannot, tied
from nereus_core.adapter import Adapter, Boundary, Receipt
from nereus_core.cluster import Device
from nereus_core.harness import Array, Harness, StepResult
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.primitives import (
    Destroy,
    Extend,
    Merge,
    OpId,
    Primitive,
    Split,
    apply,
    model_stage_of,
)
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage

BOUNDARY_S = 60.0
"""A safe boundary of a small job opens in far less; chosen, not measured."""
THREAD_S = 120.0
"""Within which everything a case does on a thread ends, or it hangs; chosen, not measured."""


@dataclass(slots=True)
class Subject:
    """What a case acts on."""

    harness: Harness
    adapter: Adapter
    job: Job
    plan: Plan
    stage: ModelStage
    """The model-stage under test."""
    spare: tuple[Device, ...]
    """Devices that no stage holds."""
    _require_layout: Callable[[Layout], None]
    """Skips the case where the adapter has no such layout."""
    _op_ids: itertools.count[int] = field(default_factory=itertools.count)
    _serials: itertools.count[int] = field(default_factory=lambda: itertools.count(100))
    """Above those of a launch: an id is never used twice within a job, not even a lost unit's."""

    # --- Looking --------------------------------------------------------------------------------

    @property
    def units(self) -> UnitMap:
        """Units alive."""
        return self.adapter.units()

    def own(self) -> tuple[Unit, ...]:
        """Units of the stage under test."""
        return self.units.of(self.stage)

    def state(self, unit: Unit | UnitId) -> Mapping[str, Array]:
        """Return logical state as the harness sees it."""
        return self.harness.peek(unit.id if isinstance(unit, Unit) else unit)

    def memory(self) -> dict[Device, int]:
        """Return resident state bytes of every healthy device."""
        healthy = self.adapter.job().cluster.healthy
        return {device: self.harness.memory_bytes(device) for device in healthy}

    # --- Acting ---------------------------------------------------------------------------------

    def boundary(self, *stages: ModelStage) -> AbstractContextManager[Boundary]:
        """Open the boundary, for all stages unless some are named."""
        return self.adapter.boundary(stages or self.job.workload.stages, timeout_s=BOUNDARY_S)

    def perform(self, op: Primitive) -> Receipt:
        """Perform a primitive."""
        match op:
            case Split():
                return self.adapter.split(op)
            case Merge():
                return self.adapter.merge(op)
            case Extend():
                return self.adapter.extend(op)
            case Destroy():
                return self.adapter.destroy(op)

    def transition(self, *ops: Primitive) -> tuple[Receipt, ...]:
        """Perform primitives at one boundary, and what ties demand; relink to what they made."""
        with self.boundary():
            receipts = tuple(self.perform(op) for op in self.completed(*ops))
            self.adapter.relink(Plan.of_units(self.units))
        return receipts

    def completed(self, *ops: Primitive) -> tuple[Primitive, ...]:
        """Return primitives followed by those that bring tied stages to the same devices.

        None follow where no stage is tied, and where ties are kept already.
        """
        units = self.units
        for op in ops:
            units = apply(op, units)
        more: list[Primitive] = []
        for stage in dict.fromkeys(model_stage_of(op) for op in ops):
            for other in tied(self.job, stage):
                for op in self._following(stage, other, units):
                    more.append(op)
                    units = apply(op, units)
        return (*ops, *more)

    def _following(
        self, stage: ModelStage, other: ModelStage, units: UnitMap
    ) -> Iterator[Primitive]:
        """Yield what brings one stage to the devices of another, in its own layout."""
        wanted = [d for unit in units.of(stage) for d in unit.devices]
        present = units.of(other)
        held = {d for unit in present for d in unit.devices}
        missing = tuple(d for d in wanted if d not in held)
        layout = present[0].layout
        n = layout.num_devices
        if len(missing) % n:
            cannot(other, stage, f"its units of {layout} do not fill {len(missing)} devices more")
        for i in range(0, len(missing), n):
            yield self.extend(missing[i : i + n], stage=other)
        for unit in present:
            left = set(unit.devices) - set(wanted)
            if left and left != set(unit.devices):
                cannot(other, stage, f"its {unit} lies on devices that stay and on some that go")
            if left:
                yield self.destroy(unit)

    def step(self) -> StepResult:
        """Run one RL step."""
        return self.harness.step()

    # --- Primitives -----------------------------------------------------------------------------

    def op_id(self) -> OpId:
        """Return an id that this job has not seen."""
        return OpId(f"case-{next(self._op_ids)}")

    def fresh(self, count: int, stage: ModelStage | None = None) -> list[UnitId]:
        """Return ids that no unit has or had."""
        return [UnitId(stage or self.stage, next(self._serials)) for _ in range(count)]

    def split(self, parent: Unit, layout: Layout) -> Split:
        """Build a split of a unit into as many units of a layout as its devices give."""
        self._require_layout(layout)
        n = layout.num_devices
        groups = [parent.devices[i : i + n] for i in range(0, len(parent.devices), n)]
        ids = self.fresh(len(groups), parent.model_stage)
        into = tuple(Unit(i, layout, g) for i, g in zip(ids, groups, strict=True))
        return Split(self.op_id(), parent.id, into)

    def merge(self, parents: Sequence[Unit], layout: Layout) -> Merge:
        """Build a merge of units into one of a layout on all their devices."""
        self._require_layout(layout)
        devices = tuple(d for parent in parents for d in parent.devices)
        stage = parents[0].model_stage
        into = Unit(self.fresh(1, stage)[0], layout, devices)
        return Merge(self.op_id(), tuple(p.id for p in parents), into)

    def extend(
        self,
        devices: Sequence[Device],
        layout: Layout | None = None,
        *,
        sources: Sequence[UnitId] | None = None,
        stage: ModelStage | None = None,
    ) -> Extend:
        """Build an extend of the stage onto devices, from all its units or from those named."""
        at = stage or self.stage
        present = self.units.of(at)
        unit = Unit(self.fresh(1, at)[0], layout or present[0].layout, tuple(devices))
        return Extend(self.op_id(), tuple(sources or (u.id for u in present)), unit)

    def destroy(self, unit: Unit) -> Destroy:
        """Build a destroy of a unit."""
        return Destroy(self.op_id(), unit.id)
