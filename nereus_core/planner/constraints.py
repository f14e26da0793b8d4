"""Constraints: what the planner may not do, from configuration and from an adapter's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import MappingProxyType
from typing import Self

from nereus_core.capabilities import Capabilities, Feature
from nereus_core.cluster import Device
from nereus_core.config import ConstraintsConfig
from nereus_core.errors import ConfigError
from nereus_core.layout import Degrees, Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Kind
from nereus_core.workload import ModelStage, Stage


@dataclass(frozen=True, slots=True)
class Constraints:
    """Everything defaults to no constraint."""

    degrees: Degrees = "powers_of_two"
    max_tp: int | None = None
    max_pp: int | None = None
    colocate: tuple[frozenset[ModelStage], ...] = ()
    """Model-stages that must share their devices."""
    pinned: Mapping[ModelStage, Layout] = field(default_factory=lambda: MappingProxyType({}))
    min_dp: Mapping[ModelStage, int] = field(default_factory=lambda: MappingProxyType({}))
    """Least number of units, as far as there are devices and memory for them."""
    excluded: frozenset[Device] = frozenset()
    """Devices that no plan uses: excluded by configuration, or draining."""
    forbidden: frozenset[tuple[Kind, Stage]] = frozenset()
    """Primitives the adapter cannot do on a kind of stage."""
    apart: tuple[frozenset[ModelStage], ...] = ()
    """Model-stages no two of which may share a device."""
    colocation: bool = True
    """Whether any may: False where the adapter holds one model-stage on a device."""

    @classmethod
    def of(
        cls, config: ConstraintsConfig, capabilities: Capabilities, backend_version: str | None
    ) -> Self:
        """Read configuration and capabilities.

        Raises:
            ConfigError: a model-stage, layout or device is not written as one, or a pin asks for
                what the adapter does not have.
        """
        forbidden = {
            (kind, stage)
            for kind in Kind
            for stage in Stage
            if (s := capabilities.of(kind, stage)) is None or not s.at(backend_version)
        }
        try:
            key = "constraints.colocate"
            colocate = tuple(frozenset(map(ModelStage.parse, g)) for g in config.colocate)
            key = "constraints.apart"
            apart = tuple(frozenset(map(ModelStage.parse, g)) for g in config.apart)
            key = "constraints.pin"
            pinned = {ModelStage.parse(s): Layout.parse(t) for s, t in config.pin.items()}
            key = "constraints.min_dp"
            min_dp = {ModelStage.parse(s): n for s, n in config.min_dp.items()}
            key = "constraints.exclude"
            excluded = frozenset(map(Device.parse, config.exclude))
        except ValueError as error:
            raise ConfigError(key, str(error)) from error

        def holds(feature: Feature) -> bool:
            support = capabilities.features.get(feature)
            return support is not None and support.at(backend_version)

        pipelines = holds(Feature.PIPELINE_STAGES)
        if not pipelines and (pins := [str(s) for s, layout in pinned.items() if layout.pp > 1]):
            why = f"{', '.join(pins)} is pinned to a layout with pp > 1, which the adapter has not"
            raise ConfigError("constraints.pin", why)
        return cls(
            config.degrees, config.max_tp, config.max_pp if pipelines else 1, colocate,
            MappingProxyType(pinned), MappingProxyType(min_dp),
            excluded, frozenset(forbidden), apart, holds(Feature.COLOCATED_STAGES),
        )  # fmt: skip

    def excluding(self, devices: frozenset[Device]) -> Constraints:
        """Return the same constraints with more devices left out."""
        return replace(self, excluded=self.excluded | devices)

    def asking(self, min_dp: Mapping[ModelStage, int]) -> Constraints:
        """Return the same constraints with other least numbers of units."""
        return replace(self, min_dp=MappingProxyType(dict(min_dp)))

    def allows_layout(self, stage: ModelStage, layout: Layout) -> bool:
        """Whether degrees and pins allow a layout, whatever runs now."""
        if stage in self.pinned:
            return layout == self.pinned[stage]
        return (self.max_tp is None or layout.tp <= self.max_tp) and (
            self.max_pp is None or layout.pp <= self.max_pp
        )

    def allows_change(
        self, stage: ModelStage, current: Placement | None, layout: Layout, dp: int
    ) -> bool:
        """Whether the adapter's primitives lead from the current placement to such a one.

        A unit of fewer devices needs Split, of more devices Merge, another layout of as many
        either (DESIGN A6). With the layout kept, more units need Extend, fewer Destroy.
        """
        if current is None:
            return True

        def able(kind: Kind) -> bool:
            return (kind, stage.stage) not in self.forbidden

        if layout == current.layout:
            more, fewer = dp > current.dp, dp < current.dp
            return (not more or able(Kind.EXTEND)) and (not fewer or able(Kind.DESTROY))
        now, then = current.layout.num_devices, layout.num_devices
        if then < now:
            return able(Kind.SPLIT)
        if then > now:
            return able(Kind.MERGE)
        return able(Kind.SPLIT) or able(Kind.MERGE)

    def missing_units(self, plan: Plan) -> int:
        """Count the units that ``min_dp`` asks for and a plan has not."""
        return sum(max(0, n - plan[s].dp) for s, n in self.min_dp.items() if s in plan)

    def allows_moves(self, stage: ModelStage) -> bool:
        """Whether a stage may leave devices for others: that takes Extend and Destroy."""
        return not {(Kind.EXTEND, stage.stage), (Kind.DESTROY, stage.stage)} & self.forbidden

    def allows(self, plan: Plan, current: Plan | None) -> bool:
        """Whether a whole plan keeps every constraint."""
        for stage, placement in plan.items():
            now = None if current is None else current.get(stage)
            if not (
                self.allows_layout(stage, placement.layout)
                and placement.dp >= self.min_dp.get(stage, 1)
                and self.allows_change(stage, now, placement.layout, placement.dp)
                and self.excluded.isdisjoint(placement.devices)
            ):
                return False
            if now is not None and not self.allows_moves(stage):
                one, other = placement.devices, now.devices
                if not (one <= other or one >= other):
                    return False
        together = all(
            plan.sharing(one, other)
            for group in self.colocate
            for one in group
            for other in group
            if one in plan and other in plan
        )
        apart = self.apart if self.colocation else (frozenset(plan),)
        return together and not any(
            plan.sharing(one, other)
            for group in apart
            for one, other in combinations(sorted(group.intersection(plan)), 2)
        )
