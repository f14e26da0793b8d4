"""The space: options of each model-stage, groupings of stages, sizes of device groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.work import Span
from nereus_core.layout import Layout, layouts
from nereus_core.plan import Plan
from nereus_core.planner.constraints import Constraints
from nereus_core.workload import ModelStage

_EXACT_DEVICES = 16
"""Up to here every size of a device group is tried; above, multiples of a sixteenth. Chosen."""


@dataclass(frozen=True, slots=True)
class Option:
    """A layout and degree of one model-stage with its predicted cost on the fullest device."""

    stage: ModelStage
    layout: Layout
    dp: int
    seconds: float
    resident_bytes: int
    transient_bytes: int

    @property
    def num_devices(self) -> int:
        """Devices the option takes."""
        return self.layout.num_devices * self.dp


def options(
    cost: CostModel,
    lengths: Lengths,
    constraints: Constraints,
    stage: ModelStage,
    num_devices: int,
    per_node: int,
    current: Plan | None,
) -> tuple[Option, ...]:
    """List what a stage may be on up to ``num_devices``, fastest first."""
    job = cost.job
    running = current[stage] if current is not None and stage in current else None
    found = []
    for layout in layouts(job.model(stage), num_devices, constraints.degrees):
        for dp in divisors(job.global_batch):
            if layout.num_devices * dp > num_devices:
                break
            if not constraints.allows(stage, layout, dp, running):
                continue
            span = Span(
                layout.tp > per_node,
                layout.num_devices > per_node,
                layout.num_devices * dp > per_node,
            )
            needs = cost.stage_bytes(stage, layout, dp, lengths)
            seconds = cost.layout_s(stage, layout, dp, lengths, span)
            found.append(Option(stage, layout, dp, seconds, needs.resident, needs.transient))
    return tuple(sorted(found, key=lambda o: (o.seconds, o.num_devices, o.layout)))


def frontier(found: Sequence[Option], size: int) -> tuple[Option, ...]:
    """Keep what fits ``size`` devices and is not beaten in seconds and in both kinds of bytes."""
    kept: list[Option] = []
    for option in found:  # fastest first, so only bytes can still improve
        if option.num_devices <= size and not any(
            k.resident_bytes <= option.resident_bytes
            and k.transient_bytes <= option.transient_bytes
            for k in kept
        ):
            kept.append(option)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Combination:
    """One option per stage of a group, feasible together."""

    options: tuple[Option, ...]

    @property
    def need_bytes(self) -> int:
        """Peak bytes of the group's fullest device."""
        return sum(o.resident_bytes for o in self.options) + max(
            o.transient_bytes for o in self.options
        )


def combinations(
    tables: Sequence[tuple[Option, ...]], capacity_bytes: int
) -> tuple[tuple[Combination, ...], Combination | None]:
    """Return the feasible combinations that no other beats in every stage's seconds.

    The second value is the smallest combination when none is feasible, to say what is lacking.
    """
    if not all(tables):
        return (), None
    fastest = Combination(tuple(table[0] for table in tables))
    if fastest.need_bytes <= capacity_bytes:
        return (fastest,), None
    every = [Combination(chosen) for chosen in product(*tables)]
    feasible = [c for c in every if c.need_bytes <= capacity_bytes]
    if not feasible:
        return (), min(every, key=lambda c: c.need_bytes)
    feasible.sort(key=lambda c: tuple(o.seconds for o in c.options))
    kept: list[Combination] = []
    for one in feasible:
        beaten = any(
            all(k.seconds <= o.seconds for k, o in zip(other.options, one.options, strict=True))
            for other in kept
        )
        if not beaten:
            kept.append(one)
    return tuple(kept), None


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def partitions(items: tuple[ModelStage, ...]) -> Iterator[tuple[tuple[ModelStage, ...], ...]]:
    """Yield every partition of stages into groups; groups are in order of their first stage."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for partition in partitions(rest):
        yield ((first,), *partition)
        for i, group in enumerate(partition):
            merged = (first, *group)
            yield (merged, *partition[:i], *partition[i + 1 :])


@cache
def compositions(total: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """List the ways to cut ``total`` devices into ``parts`` groups, none empty.

    >>> compositions(3, 2)
    ((1, 2), (2, 1))
    """
    grain = 1 if total <= _EXACT_DEVICES else max(1, total // _EXACT_DEVICES)
    units = total // grain

    def cut(left: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (left,)
            return
        for head in range(1, left - count + 2):
            for tail in cut(left - head, count - 1):
                yield (head, *tail)

    if parts > units:
        return ()
    rest = total - units * grain
    return tuple((*(n * grain for n in c[:-1]), c[-1] * grain + rest) for c in cut(units, parts))
