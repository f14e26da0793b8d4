"""From a solution to devices: as much as possible of the current placement stays where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations

from nereus_core.cluster import Device
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.transition import bytes_to_move
from nereus_core.plan import Placement, Plan, place_problems
from nereus_core.planner.bounds import TIE
from nereus_core.planner.choices import Choice
from nereus_core.planner.groups import Spans, cut, packed, shape_between
from nereus_core.planner.search import Solution
from nereus_core.planner.space import Space
from nereus_core.workload import ModelStage

_FEWEST_ARRANGEMENTS = 3
_DEVICES_ARRANGED = 6_000
"""Devices placed at most to find the arrangement nearest to the current plan; chosen for speed."""


@dataclass(frozen=True, slots=True)
class Placer:
    """Turns solutions into plans, near to a current plan where there is one."""

    space: Space
    current: Plan | None
    _fresh: dict[tuple[Choice, tuple[int, int]], Placement] = field(
        default_factory=dict, repr=False
    )
    """Placements made so far: equal ones are one object."""
    _beside: dict[tuple[ModelStage, Choice, tuple[int, int]], Placement] = field(
        default_factory=dict, repr=False
    )
    """The same, made beside what runs of a stage."""
    _moves: dict[tuple[ModelStage, int], tuple[Placement, int]] = field(
        default_factory=dict, repr=False
    )
    """Bytes to move to a placement, by its identity."""

    @property
    def _cost(self) -> CostModel:
        return self.space.cost

    @property
    def _lengths(self) -> Lengths:
        return self.space.lengths

    def canonical(self, solution: Solution) -> Plan:
        """Place groups in order of nodes, the largest first, every stage from its group's start."""
        placements = {}
        for block, span, rows in zip(solution.blocks, solution.spans, solution.rows, strict=True):
            shape = shape_between(self.space.node_sizes, *span)
            for index, row in zip(block, rows, strict=True):
                options = self.space.options[index]
                key = (options.choice(row), span)
                if key not in self._fresh:
                    group = self.space.devices[slice(*span)]
                    self._fresh[key] = _placed(key[0], group, None)
                placement = placements[options.stage] = self._fresh[key]
                self._cost.remember(placement, options.priced(row, shape), self._lengths)
        return Plan(placements)

    def unbounded(self, solution: Solution) -> Plan:
        """Same groups with every stage's fastest choice, whatever memory it needs."""
        shapes = [shape_between(self.space.node_sizes, *span) for span in solution.spans]
        rows = tuple(
            tuple(self.space.fastest(index, shape) for index in block)
            for block, shape in zip(solution.blocks, shapes, strict=True)
        )
        return self.canonical(replace(solution, rows=rows))

    def variants(self, solution: Solution) -> Iterator[Plan]:
        """For every stage, the plan with that stage's next fastest layout that fits."""
        spans = solution.spans
        for at, (block, span) in enumerate(zip(solution.blocks, spans, strict=True)):
            shape = shape_between(self.space.node_sizes, *span)
            for i, index in enumerate(block):
                for row in self.space.by_speed(index, shape):
                    own = solution.rows[at]
                    if row == own[i]:
                        continue
                    changed = (*own[:i], row, *own[i + 1 :])
                    rows = (*solution.rows[:at], changed, *solution.rows[at + 1 :])
                    plan = self.canonical(replace(solution, rows=rows))
                    if self._cost.memory_problem(plan, self._lengths) is None:
                        yield plan
                        break

    def nearest(self, solutions: Sequence[Solution]) -> Plan:
        """Return the plan of equally fast solutions that moves fewest bytes from the current one.

        Ties beyond that are broken by the plan's text, so that the result is deterministic.
        """
        if self.current is None:
            return self.canonical(solutions[0])
        limit_s = solutions[0].seconds * (1 + TIE) + self._cost.between.seconds
        arrangements = (p for s in solutions for p in self._candidates(s, limit_s))
        most = max(_FEWEST_ARRANGEMENTS, _DEVICES_ARRANGED // self.space.num_devices)
        plans = [self._kept_back(p, limit_s) for p in _distinct(islice(arrangements, most))]
        allowed = [p for p in plans if self.space.constraints.allows(p, self.current)] or plans
        moved = [self.moved_bytes(p) for p in allowed]
        fewest = [p for p, b in zip(allowed, moved, strict=True) if b == min(moved)]
        return min(fewest, key=lambda p: (str(p), str(p.to_json())))

    def moved_bytes(self, plan: Plan) -> int:
        """Bytes that a change from the current plan sends between devices."""
        if self.current is None:
            return 0
        return sum(self._stage_bytes(s, p) for s, p in plan.items() if s in self.current)

    def _stage_bytes(self, stage: ModelStage, placement: Placement) -> int:
        assert self.current is not None
        key = (stage, id(placement))
        if key not in self._moves:
            moved = bytes_to_move(self._cost.job, self.current[stage], placement, stage)
            self._moves[key] = (placement, moved)
        return self._moves[key][1]

    def _candidates(self, solution: Solution, limit_s: float) -> Iterator[Plan]:
        """Plans of one solution: its groups in every order that keeps their shapes."""
        canonical = self.canonical(solution)
        yield canonical
        spans = solution.spans
        shapes = [shape_between(self.space.node_sizes, *span) for span in spans]
        sizes = [end - start for start, end in spans]
        for order in permutations(range(len(spans))):
            groups = cut(sizes, order)
            if [shape_between(self.space.node_sizes, *group) for group in groups] == shapes:
                plan = self._near(solution, groups)
                if self._as_good(plan, limit_s):
                    yield plan

    def _near(self, solution: Solution, groups: Spans) -> Plan:
        """Place every stage in its group, beside the units that it has there now."""
        assert self.current is not None
        placements = {}
        for block, group, rows in zip(solution.blocks, groups, solution.rows, strict=True):
            for index, row in zip(block, rows, strict=True):
                options = self.space.options[index]
                stage, choice = options.stage, options.choice(row)
                key = (stage, choice, group)
                if key not in self._beside:
                    devices = self.space.devices[slice(*group)]
                    self._beside[key] = _placed(choice, devices, self.current.get(stage))
                placements[stage] = self._beside[key]
        return Plan(placements)

    def _kept_back(self, plan: Plan, limit_s: float) -> Plan:
        """Give stages their current placement back where the step does not become slower."""
        assert self.current is not None
        changed = [s for s in plan if s in self.current and plan[s] != self.current[s]]
        cost = {s: self._stage_bytes(s, plan[s]) for s in changed}
        for stage in sorted(changed, key=lambda s: (-cost[s], s)):
            # A plan without units that were lost may not divide the batch any more.
            if self._cost.job.global_batch % self.current[stage].dp:
                continue
            trial = Plan({**plan, stage: self.current[stage]})
            if self._as_good(trial, limit_s):
                plan = trial
        return plan

    def _as_good(self, plan: Plan, limit_s: float) -> bool:
        return (
            self.space.constraints.allows(plan, self.current)
            and not place_problems(plan, self._cost.job)
            and self._cost.step(plan, self._lengths).step.mean_s <= limit_s
            and self._cost.memory_problem(plan, self._lengths) is None
        )


def _distinct(plans: Iterable[Plan]) -> Iterator[Plan]:
    """Leave out plans of the very same placements."""
    seen = set()
    for plan in plans:
        key = tuple(map(id, plan.values()))
        if key not in seen:
            seen.add(key)
            yield plan


def _placed(choice: Choice, group: Sequence[Device], now: Placement | None) -> Placement:
    """Place a stage in its group; units of the same layout that lie in the group stay."""
    fresh = packed(choice.layout, choice.dp, group)
    assert fresh is not None, "the search chose a layout that its group cannot hold"
    if now is None or now.layout != choice.layout:
        return fresh
    inside = set(group)
    stay = [unit for unit in now.units if inside.issuperset(unit)][: choice.dp]
    if not stay:
        return fresh
    taken = {d for unit in stay for d in unit}
    rest = packed(choice.layout, choice.dp - len(stay), [d for d in group if d not in taken])
    if rest is None:
        return fresh
    return Placement(choice.layout, (*stay, *rest.units))
