"""Running: a live OpenRLHF job as the adapter sees it: its groups, engines, devices and units."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nereus_adapters.openrlhf.facts import REWARD_INFER, BackendSection
from nereus_adapters.openrlhf.seats import Bundle, seating
from nereus_adapters.openrlhf.signals import Signals
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
    """One job. Units are read off the groups and engines that the trainer has at the moment."""

    trainer: Any
    section: BackendSection
    gate: Gate
    signals: Signals
    bundles: dict[Device, Bundle] = field(default_factory=dict)
    """All devices that the job holds, those without a unit among them."""
    _devices: dict[Any, tuple[Device, ...]] = field(default_factory=dict)
    """By id of a rank's or engine's actor."""
    _names: dict[tuple[ModelStage, tuple[Device, ...], Layout, Any], UnitId] = field(
        default_factory=dict
    )
    _serials: dict[ModelStage, itertools.count[int]] = field(default_factory=dict)

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

    @property
    def engine_tp(self) -> int:
        """Devices of one engine."""
        return int(self.args.vllm.tensor_parallel_size)

    def look(self) -> None:
        """Ask every rank and engine where it is; at the start, when all of them are idle."""
        groups = list(self.groups.values())
        engines = self.trainer.vllm_engines
        found = seating(
            [g._actor_handlers for g in groups], engines, self.engine_tp, self.section.start_s
        )
        for group, devices in zip(groups, found.ranks, strict=True):
            for handle, device in zip(group._actor_handlers, devices, strict=True):
                self._devices[handle._actor_id] = (device,)
        for engine, taken in zip(engines, found.engines, strict=True):
            self._devices[engine._actor_id] = taken
        self.bundles |= found.bundles

    def devices_of(self, actor: Any) -> tuple[Device, ...]:
        """Return the devices of a rank or an engine."""
        return self._devices[actor._actor_id]

    def units(self) -> UnitMap:
        """Return the units alive: each engine, and each data-parallel replica of a group."""
        found = []
        for stage, group in self.groups.items():
            tp = group.duplicate_actors
            for first in range(0, len(group._actor_handlers), tp):
                ranks = group._actor_handlers[first : first + tp]
                devices = tuple(d for rank in ranks for d in self._devices[rank._actor_id])
                found.append(self._unit(stage, Layout(tp), devices, ranks[0]._actor_id))
        for engine in self.trainer.vllm_engines:
            devices = self._devices[engine._actor_id]
            layout = Layout(len(devices))
            found.append(self._unit(ACTOR_GENERATE, layout, devices, engine._actor_id))
        return UnitMap(found)

    def _unit(
        self, stage: ModelStage, layout: Layout, devices: tuple[Device, ...], actor: Any
    ) -> Unit:
        key = (stage, devices, layout, actor)
        if key not in self._names:
            serials = self._serials.setdefault(stage, itertools.count())
            self._names[key] = UnitId(stage, next(serials))
        return Unit(self._names[key], layout, devices)
