"""From each rank's partial gradients to the global ones: sums over copies, units, and the norm.

A parameter may be held by several ranks of a unit, and these copies must stay bit-identical. Sums
are therefore made in flat buckets of tensors that the same ranks share: a reduction's order of
additions depends on a number's place in its buffer, and so it is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from nereus_adapters.torch.engine.group import Group
from nereus_adapters.torch.engine.groups import UnitGroups, members
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import Box, tensor_rules, unit_shards

# Chosen, not measured: large enough that a message's latency does not count.
BUCKET_BYTES = 32 * 2**20


class GradientPlan:
    """Which gradients of a rank are summed over which group, and which count for the norm."""

    def __init__(self, model: ModelSpec, layout: Layout, local_rank: int) -> None:
        shard = unit_shards(model, layout)[local_rank]
        rules = {rule.name: rule for rule in tensor_rules(model)}
        groups = members(model, layout, local_rank)
        self._owned = frozenset(
            name for name, owner in owners(model, layout, local_rank).items() if owner == local_rank
        )
        self._partial: dict[str, list[str]] = {"tp": [], "kv": [], "ends": []}
        buckets: dict[str, list[str]] = {"own": [], "tp": [], "kv": [], "ends": []}
        for name in shard:
            rule = rules[name]
            kind = "own"
            if rule.tp_dim is None and layout.tp > 1:
                kind = "tp"
                # Every tp rank sees only its own heads; elsewhere replicas compute the whole.
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    self._partial["tp"].append(name)
            elif rule.tp_dim is not None and rule.parts < layout.tp:
                kind = "kv"
                self._partial["kv"].append(name)
            elif rule.first and rule.last and "ends" in groups:
                kind = "ends"
                self._partial["ends"].append(name)
            buckets[kind].append(name)
        self._buckets = [names for names in buckets.values() if names]

    def sum_copies(self, grads: Mapping[str, torch.Tensor], groups: UnitGroups) -> None:
        """Complete, in place, the gradients of which a unit's ranks hold parts."""
        for group, names in (
            (groups.tp, self._partial["tp"]),
            (groups.kv, self._partial["kv"]),
            (groups.ends, self._partial["ends"]),
        ):
            if names and group is not None:
                _sum_flat([grads[name] for name in names], group)

    def sum_units(self, grads: Mapping[str, torch.Tensor], group: Group) -> None:
        """Sum gradients over the units, in place, bit-identical on all of them."""
        for names in self._buckets:
            _sum_flat([grads[name] for name in names], group)

    def norm(self, grads: Mapping[str, torch.Tensor], group: Group) -> float:
        """Return the global L2 norm, every logical element counted once; group: the unit."""
        squares = [grads[n].double().square().sum() for n in grads if n in self._owned]
        device = next(iter(grads.values())).device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for square in squares:
            total += square
        return math.sqrt(float(group.all_reduce(total)))


def owners(model: ModelSpec, layout: Layout, local_rank: int) -> dict[str, int]:
    """Return per tensor of a rank the lowest local rank of the unit that holds the same box."""
    shards = unit_shards(model, layout)

    def first(name: str, box: Box) -> int:
        return next(rank for rank, shard in enumerate(shards) if shard.get(name) == box)

    return {name: first(name, box) for name, box in shards[local_rank].items()}


def _sum_flat(tensors: Sequence[torch.Tensor], group: Group) -> None:
    if group.size == 1:
        return
    start = 0
    while start < len(tensors):
        stop, size = start, 0
        while stop < len(tensors) and (stop == start or size < BUCKET_BYTES):
            size += tensors[stop].nbytes
            stop += 1
        run = tensors[start:stop]
        flat = group.all_reduce(torch.cat([t.flatten() for t in run]))
        for tensor, summed in zip(run, flat.split([t.numel() for t in run]), strict=True):
            tensor.copy_(summed.view_as(tensor))
        start = stop
