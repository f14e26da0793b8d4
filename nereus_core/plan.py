"""Plan: a target layout and devices for every model-stage; its rules, and how two plans differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Self

from nereus_core.cluster import Device
from nereus_core.errors import PlanError
from nereus_core.layout import Layout, stage_problems
from nereus_core.units import UnitMap
from nereus_core.workload import Job, ModelStage


@dataclass(frozen=True, slots=True)
class Placement:
    """One model-stage of a plan: a layout and, per unit, its devices in order of local rank."""

    layout: Layout
    units: tuple[tuple[Device, ...], ...]

    @property
    def dp(self) -> int:
        """Number of units."""
        return len(self.units)

    @property
    def devices(self) -> frozenset[Device]:
        """All devices of the stage."""
        return frozenset(chain.from_iterable(self.units))

    def __str__(self) -> str:
        return f"{self.layout}dp{self.dp}"

    @classmethod
    def packed(cls, layout: Layout, devices: tuple[Device, ...]) -> Self:
        """Cut devices, in order, into units of a layout; the number must divide.

        >>> from nereus_core.cluster import Device
        >>> str(Placement.packed(Layout(2, 1), tuple(Device("node0", i) for i in range(4))))
        'tp2pp1dp2'
        """
        n = layout.num_devices
        if not devices or len(devices) % n:
            raise PlanError([f"{len(devices)} devices do not divide into units of {layout} ({n})"])
        return cls(layout, tuple(devices[i : i + n] for i in range(0, len(devices), n)))


class Plan(Mapping[ModelStage, Placement]):
    """A placement per model-stage; immutable, ordered by stage name."""

    __slots__ = ("_placements",)

    def __init__(self, placements: Mapping[ModelStage, Placement]) -> None:
        self._placements = MappingProxyType(dict(sorted(placements.items())))

    def __getitem__(self, stage: ModelStage) -> Placement:
        return self._placements[stage]

    def __iter__(self) -> Iterator[ModelStage]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def __hash__(self) -> int:
        return hash(tuple(self._placements.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (dict(self._placements),)

    def __str__(self) -> str:
        return " ".join(f"{stage}={placement}" for stage, placement in self.items())

    def __repr__(self) -> str:
        return f"Plan({self})"

    @classmethod
    def of_units(cls, units: UnitMap) -> Self:
        """Read the plan that running units stand for (they share one layout per stage, I3)."""
        return cls(
            {
                stage: Placement(
                    units.of(stage)[0].layout, tuple(u.devices for u in units.of(stage))
                )
                for stage in units.stages()
            }
        )

    @property
    def devices(self) -> frozenset[Device]:
        """All devices in use."""
        return frozenset(d for p in self.values() for d in p.devices)

    def sharing(self, one: ModelStage, other: ModelStage) -> bool:
        """Whether two stages are colocated on some device."""
        return not self[one].devices.isdisjoint(self[other].devices)

    def to_json(self) -> dict[str, object]:
        """Return plain values for JSON; `from_json` reads them back."""
        return {
            str(stage): {
                "layout": str(p.layout),
                "units": [[str(d) for d in unit] for unit in p.units],
            }
            for stage, p in self.items()
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Mapping[str, object]]) -> Self:
        """Read what `to_json` wrote; raises PlanError naming what is malformed."""
        try:
            return cls(
                {
                    ModelStage.parse(stage): Placement(
                        Layout.parse(str(p["layout"])),
                        tuple(
                            tuple(Device.parse(d) for d in unit)
                            for unit in p["units"]  # type: ignore[attr-defined]  # checked below
                        ),
                    )
                    for stage, p in value.items()
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError([f"not a plan: {error}"]) from error


def plan_problems(plan: Plan, job: Job) -> tuple[str, ...]:
    """Say what rules a plan breaks, or return (). Memory is the cost model's matter."""
    problems: list[str] = []
    wanted, healthy = set(job.workload.stages), set(job.cluster.healthy)
    problems += [f"{stage} has no placement" for stage in sorted(wanted - set(plan))]
    problems += [
        f"{stage} is not part of {job.workload.algorithm}" for stage in sorted(set(plan) - wanted)
    ]
    placements = {id(p): p for p in plan.values()}  # one that stages share is looked at once
    on_devices = {name: _device_problems(p, healthy) for name, p in placements.items()}
    for stage in sorted(wanted & set(plan)):
        placement = plan[stage]
        problems += [f"{stage}: {p}" for p in stage_problems(job, stage, placement.layout)]
        if not placement.units:
            problems.append(f"{stage} has no unit")
        elif job.global_batch % placement.dp:
            problems.append(f"{stage}: dp={placement.dp} does not divide batch {job.global_batch}")
        problems += [f"{stage}: {p}" for p in on_devices[id(placement)]]
        listed = sum(map(len, placement.units))
        if listed and (problem := job.share_problem(stage, listed, placement.dp)):
            problems.append(f"{stage}: {problem}")
    return (*problems, *place_problems(plan, job))


def _device_problems(placement: Placement, healthy: Set[Device]) -> list[str]:
    problems = []
    distinct = set(chain.from_iterable(placement.units))
    if len(distinct) != sum(map(len, placement.units)):
        problems.append("a device is in two units")
    if set(map(len, placement.units)) - {placement.layout.num_devices}:
        problems.append(f"a unit has not {placement.layout.num_devices} devices")
    if not distinct <= healthy:
        problems += [f"{d} is not healthy" for d in sorted(distinct - healthy)]
    return problems


def place_problems(plan: Plan, job: Job) -> tuple[str, ...]:
    """Say what a plan breaks of the job's rules on where stages lie (`plan_problems` has all)."""
    problems = []
    for stage in sorted(job.within_node.intersection(plan)):
        for unit in plan[stage].units:
            nodes = sorted({device.node for device in unit})
            if len(nodes) > 1:
                problems.append(
                    f"{stage}: a unit lies on {', '.join(nodes)}, and has to lie on one node"
                )
    for group in job.together:
        held = {plan[stage].devices for stage in group if stage in plan}
        if len(held) > 1:
            problems.append(f"{', '.join(map(str, sorted(group)))} must hold the same devices")
    return tuple(problems)


def check_plan(plan: Plan, job: Job) -> None:
    """Raise PlanError unless the plan keeps every rule on this job."""
    if problems := plan_problems(plan, job):
        raise PlanError(problems)


@dataclass(frozen=True, slots=True)
class StageChange:
    """How one model-stage differs between two plans."""

    model_stage: ModelStage
    before: Placement
    after: Placement

    def __str__(self) -> str:
        moved = len(self.after.devices - self.before.devices)
        freed = len(self.before.devices - self.after.devices)
        return f"{self.model_stage}: {self.before} -> {self.after} (+{moved} -{freed} devices)"


def diff(before: Plan, after: Plan) -> tuple[StageChange, ...]:
    """List the stages whose layout, devices or order of devices differ."""
    return tuple(
        StageChange(stage, before[stage], after[stage])
        for stage in before
        if stage in after and before[stage] != after[stage]
    )
