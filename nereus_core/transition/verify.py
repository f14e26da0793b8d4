"""What a transition must not change: the units it promised, and the state they hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nereus_core.adapter import Adapter, Fingerprint
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, StateDiffers, UnitLost
from nereus_core.primitives import Extend, model_stage_of
from nereus_core.state import Slot
from nereus_core.transition.graph import TransitionGraph
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import ModelStage


def check_units(found: UnitMap, graph: TransitionGraph, failed: Collection[Device]) -> None:
    """Raise unless the units alive are those the graph leads to; UnitLost where devices failed."""
    expected = graph.units_after()
    if lost := [u for u in expected if u not in expected.intact(failed)]:
        raise UnitLost(lost, tuple(found), f"a device failed during {graph.name}")
    if found != expected:
        missing = sorted(str(u) for u in set(expected.values()) - set(found.values()))
        others = sorted(str(u) for u in set(found.values()) - set(expected.values()))
        raise NereusError(
            f"after transition {graph.name} the adapter's units differ from the graph's: "
            f"missing {', '.join(missing) or 'none'}; unexpected {', '.join(others) or 'none'}."
        )


@dataclass(frozen=True, slots=True)
class Baseline:
    """Fingerprints taken before a transition: one unit of each stage that changes.

    A stage that has no unit is held to the parameters of the train stage it is extended from.
    Cost: one digest pass over a unit of each changed stage, and over every unit made.
    """

    of_stage: Mapping[ModelStage, Fingerprint]

    @classmethod
    def take(cls, graph: TransitionGraph, adapter: Adapter) -> Baseline:
        """Fingerprint before anything moves."""
        witnesses = {stage: _witness(stage, graph) for stage in graph.changed}
        return cls({s: adapter.fingerprint(u) for s, u in witnesses.items() if u is not None})

    def check(self, graph: TransitionGraph, adapter: Adapter) -> None:
        """Raise StateDiffers when a unit that was made holds anything else."""
        for unit in graph.units_after():
            before = self.of_stage.get(unit.model_stage)
            if before is not None and unit not in graph.units_before:
                _compare(before, adapter.fingerprint(unit))


def _witness(stage: ModelStage, graph: TransitionGraph) -> UnitId | None:
    """Name a unit whose state the stage must have afterwards."""
    own = graph.units_before.of(stage)
    if own:
        return own[0].id
    for op in graph.ops:
        if isinstance(op, Extend) and op.sources and model_stage_of(op) == stage:
            followed = graph.units_before.of(op.sources[0].model_stage)
            return followed[0].id if followed else None
    return None


def _compare(before: Fingerprint, after: Fingerprint) -> None:
    followed = before.unit.model_stage != after.unit.model_stage
    expected, found = dict(before.tensors), dict(after.tensors)
    if followed:
        expected = {k: v for k, v in expected.items() if k.startswith(f"{Slot.PARAM}/")}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise StateDiffers(
                after.unit, name, f"digest {found.get(name)}", f"{expected.get(name)}"
            )
    if not followed and dict(before.steps) != dict(after.steps):
        raise StateDiffers(after.unit, "counters", dict(after.steps), dict(before.steps))
