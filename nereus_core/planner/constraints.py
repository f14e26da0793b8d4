"""Constraints: what the planner may not do, from configuration and from an adapter's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from nereus_core.capabilities import Capabilities
from nereus_core.cluster import Device
from nereus_core.config import ConstraintsConfig
from nereus_core.errors import ConfigError
from nereus_core.layout import Degrees, Layout
from nereus_core.plan import Placement
from nereus_core.primitives import Kind
from nereus_core.workload import ModelStage, Stage


@dataclass(frozen=True, slots=True)
class Constraints:
    """Restrictions of the space; the default allows every layout in powers of two."""

    degrees: Degrees = "powers_of_two"
    max_tp: int | None = None
    max_pp: int | None = None
    colocate: tuple[frozenset[ModelStage], ...] = ()
    pinned: Mapping[ModelStage, Layout] = field(default_factory=dict)
    excluded: frozenset[Device] = frozenset()
    forbidden: frozenset[tuple[Kind, Stage]] = frozenset()
    """Primitives that the adapter cannot do on a kind of stage."""

    @classmethod
    def of(
        cls,
        config: ConstraintsConfig,
        capabilities: Capabilities | None = None,
        backend_version: str | None = None,
    ) -> Self:
        """Read the configuration and the adapter's capability table.

        Raises:
            ConfigError: a model-stage, layout or device is not written as one.
        """
        try:
            colocate = tuple(frozenset(map(ModelStage.parse, group)) for group in config.colocate)
            pinned = {ModelStage.parse(s): Layout.parse(y) for s, y in config.pin.items()}
            excluded = frozenset(map(Device.parse, config.exclude))
        except ValueError as error:
            raise ConfigError("constraints", str(error)) from error
        forbidden = set()
        if capabilities is not None:
            for kind in Kind:
                for stage in Stage:
                    support = capabilities.of(kind, stage)
                    if support is None or not support.at(backend_version):
                        forbidden.add((kind, stage))
        return cls(
            config.degrees,
            config.max_tp,
            config.max_pp,
            colocate,
            pinned,
            excluded,
            frozenset(forbidden),
        )

    def allows(self, stage: ModelStage, layout: Layout, dp: int, current: Placement | None) -> bool:
        """Whether a stage may get this layout and degree, coming from its current placement."""
        if (self.max_tp or layout.tp) < layout.tp or (self.max_pp or layout.pp) < layout.pp:
            return False
        if self.pinned.get(stage, layout) != layout:
            return False
        if current is None:
            return True

        def can(kind: Kind) -> bool:
            return (kind, stage.stage) not in self.forbidden

        if layout != current.layout and not (can(Kind.SPLIT) and can(Kind.MERGE)):
            return False
        grows, shrinks = dp > current.dp, dp < current.dp
        return (not grows or can(Kind.EXTEND)) and (not shrinks or can(Kind.DESTROY))

    def may_group(self, groups: tuple[frozenset[ModelStage], ...]) -> bool:
        """Whether stages that must share devices do."""
        return all(any(together <= group for group in groups) for together in self.colocate)
