"""When nothing fits: which plan comes nearest, and what it lacks."""

from __future__ import annotations

import numpy as np

from nereus_core.plan import Plan
from nereus_core.planner.bounds import Block, partitions
from nereus_core.planner.groups import Shape, cut, largest_first, packed, shape_between
from nereus_core.planner.space import Space


def tightest(space: Space) -> str:
    """Describe the plan whose fullest device exceeds its memory least.

    Per partition of stages into groups, devices are shared out by need and every stage takes the
    choice that needs least of each; that is where one would have to save.
    """
    nearest: tuple[int, str] | None = None
    for blocks in partitions(len(space.stages), space.together, space.apart):
        plan = _smallest(space, blocks)
        if plan is None:
            continue
        need = max(space.cost.memory(plan, space.lengths).values())
        problem = space.cost.memory_problem(plan, space.lengths)
        if problem is not None and (nearest is None or need < nearest[0]):
            nearest = (need, problem)
    if nearest is None:
        return "no layout of its stages can be packed onto the nodes that are left"
    return nearest[1]


def _smallest(space: Space, blocks: tuple[Block, ...]) -> Plan | None:
    """The plan of a partition that needs least memory, or None where something cannot be packed."""
    if len(blocks) > space.num_devices:
        return None
    least = [_needs(space, i) * o.grid.num_devices for i, o in enumerate(space.options)]
    wants = np.array([sum(least[i].min() for i in block) for block in blocks])
    spare = space.num_devices - len(blocks)
    sizes = [1 + int(spare * want / wants.sum()) for want in wants]
    placements = {}
    for block, span in zip(blocks, cut(sizes, largest_first(sizes)), strict=True):
        shape = shape_between(space.node_sizes, *span)
        devices = space.devices[slice(*span)]
        for index in block:
            row = _smallest_row(space, index, shape)
            if row is None:
                return None
            choice = space.options[index].choice(row)
            placement = packed(choice.layout, choice.dp, devices)
            assert placement is not None, "the shape said that it fits"
            placements[space.stages[index]] = placement
    return Plan(placements)


def _needs(space: Space, index: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    options = space.options[index]
    return np.asarray(options.persistent_bytes + options.transient_bytes.min(axis=1))


def _smallest_row(space: Space, index: int, shape: Shape) -> int | None:
    o = space.options[index]
    fits, _ = o.fitted(shape)
    if not fits.any():
        return None
    return int(np.where(fits, _needs(space, index), np.inf).argmin())
