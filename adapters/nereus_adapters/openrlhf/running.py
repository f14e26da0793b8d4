"""Running: a live OpenRLHF job as the adapter sees it: its groups, engines, devices and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nereus_adapters.openrlhf.facts import REWARD_INFER, BackendSection
from nereus_adapters.openrlhf.seats import Bundle, seating
from nereus_adapters.openrlhf.signals import Signals
from nereus_adapters.openrlhf.warm import Seat
from nereus_core.cluster import Device
from nereus_core.gate import Gate
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER, ModelStage

_GROUPS = {
    ACTOR_TRAIN: "actor_model_group",
    CRITIC_TRAIN: "critic_model_group",
    REF_INFER: "reference_model_group",
    REWARD_INFER: "reward_model_group",
}
"""Attribute of the trainer that holds the group of a stage."""


@dataclass(slots=True)
class Running:
    """One job: OpenRLHF's objects, and which unit each of them stands for."""

    trainer: Any
    section: BackendSection
    gate: Gate
    signals: Signals
    bundles: dict[Device, Bundle] = field(default_factory=dict)
    """All devices that the job holds, those without a unit among them."""
    alive: UnitMap = field(default_factory=UnitMap)
    ranks: dict[tuple[ModelStage, Device], Any] = field(default_factory=dict)
    """Actors that are, or wait to be, a rank of a stage on a device."""
    engines: dict[UnitId, Any] = field(default_factory=dict)
    """Actors of vLLM engines by unit."""
    max_steps: int | None = None
    """Optimizer steps of the whole job, to which OpenRLHF stretches its learning-rate schedule."""
    first: dict[ModelStage, str] = field(default_factory=dict)
    """Rank 0 of each group at the start of the job: the driver knows the group by it."""
    whole: set[tuple[ModelStage, Device]] = field(default_factory=set)
    """Devices that OpenRLHF gave to one model alone: Ray starts nothing else on them."""
    waiting: list[Seat] = field(default_factory=list)
    """Seats without an engine."""
    seated: dict[UnitId, Seat] = field(default_factory=dict)
    """Seats of engines that have one; OpenRLHF's own have none."""
    opening: dict[UnitId, Any] = field(default_factory=dict)
    """Engines that start in their seats, until they were waited for."""
    joined: list[tuple[Device, ...]] = field(default_factory=list)
    """Devices that the job did not start with and now holds, by placement group."""
    offered: frozenset[Device] = frozenset()
    """Devices beside those, which Ray had free when it was asked last."""
    met: frozenset[Device] = frozenset()
    """All that were ever offered, of nodes that are there."""
    refused: dict[str, int] = field(default_factory=dict)
    """Nodes that could not give what they seemed to have free, and what that was."""
    asked_back: frozenset[Device] = frozenset()
    """Of those leaving: named by somebody, not by the end of their node."""
    leaving: frozenset[Device] = frozenset()
    """Devices that nothing is to be started on, and that no process is left on without a unit."""
    cold: bool = False
    """Whether engines start as OpenRLHF starts them: on the way back, which owes seats nothing."""

    @property
    def args(self) -> SimpleNamespace:
        """The job's arguments, as its trainer has them."""
        found: SimpleNamespace = self.trainer.args
        return found

    @property
    def groups(self) -> Mapping[ModelStage, Any]:
        """Groups of ranks by the stage they run."""
        found = {stage: getattr(self.trainer, name) for stage, name in _GROUPS.items()}
        return {stage: group for stage, group in found.items() if group is not None}

    def look(self) -> None:
        """Ask every rank and engine where it is; at the start, when all of them are idle.

        A unit is an engine, or a data-parallel replica of a group: ranks of one tensor-parallel
        group.
        """
        groups, engines = self.groups, self.trainer.vllm_engines
        tp = int(self.args.vllm.tensor_parallel_size)
        handles = [group._actor_handlers for group in groups.values()]
        found = seating(handles, engines, tp, self.section.start_s)
        self.bundles = dict(found.bundles)
        units: list[Unit] = []
        shares = iter(found.shares)
        for (stage, group), devices in zip(groups.items(), found.ranks, strict=True):
            pairs = zip(devices, group._actor_handlers, strict=True)
            self.ranks |= {(stage, device): handle for device, handle in pairs}
            self.whole |= {(stage, device) for device in devices if next(shares) == 1.0}
            self.first[stage] = group._actor_handlers[0]._actor_id.hex()
            units += cut(stage, devices, group.duplicate_actors)
        for number, (engine, taken) in enumerate(zip(engines, found.engines, strict=True)):
            unit = Unit(UnitId(ACTOR_GENERATE, number), Layout(tp), taken)
            self.engines[unit.id] = engine
            if next(shares) == 1.0:
                self.whole |= {(ACTOR_GENERATE, device) for device in taken}
            units.append(unit)
        self.alive = UnitMap(units)

    @property
    def devices(self) -> frozenset[Device]:
        """Devices that the job holds, and those that were ever offered to it."""
        return self.met.union(self.bundles)

    def devices_of(self, stage: ModelStage) -> tuple[Device, ...]:
        """Return the devices of a stage in order of rank: units by id, then local rank."""
        return tuple(d for unit in self.alive.of(stage) for d in unit.devices)

    def handles(self, stage: ModelStage) -> list[Any]:
        """Return the ranks of a stage in order."""
        return [self.ranks[stage, device] for device in self.devices_of(stage)]

    def layout(self, stage: ModelStage) -> Layout:
        """Return the layout that the units of a stage share."""
        return self.alive.of(stage)[0].layout


def cut(stage: ModelStage, devices: Sequence[Device], tp: int) -> list[Unit]:
    """Cut the ranks of a group into units; OpenRLHF numbers ranks of one TP group in a row."""
    return [
        Unit(UnitId(stage, first // tp), Layout(tp), tuple(devices[first : first + tp]))
        for first in range(0, len(devices), tp)
    ]
