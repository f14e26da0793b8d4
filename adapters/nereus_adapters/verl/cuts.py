"""cuts: how the ranks of a unit share tensors, whatever their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus_core.layout import Layout, layer_ranges
from nereus_core.state import Box


@dataclass(frozen=True, slots=True)
class Cut:
    """Along which dimension a tensor is cut."""

    dim: int | None
    """None where every rank holds all of it."""
    uneven: bool = False
    """Whether ranks that do not divide the dimension cut it all the same, the last part being
    shorter or empty; otherwise each holds all of it."""
    layer: int = 0
    """In whose pipeline stage it lies."""

    def boxes(self, shape: tuple[int, ...], ranks: int) -> list[Box]:
        """Return the box of each rank.

        Source: torch.distributed.tensor.Shard, which cuts as ``torch.chunk`` does: equal pieces of
        ceil(n / ranks), of which the last may be short or empty.
        """
        dim = self.dim
        if dim is None or (shape[dim] % ranks and not self.uneven):
            return [Box((0,) * len(shape), shape)] * ranks
        extent, size = shape[dim], -(-shape[dim] // ranks)
        found = []
        for rank in range(ranks):
            first = min(rank * size, extent)
            offset, mine = [0] * len(shape), list(shape)
            offset[dim], mine[dim] = first, min(size, extent - first)
            found.append(Box(tuple(offset), tuple(mine)))
        return found


ROWS = Cut(0, uneven=True)
"""As ``fully_shard`` cuts every parameter."""


def rank_boxes(
    shapes: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
    num_layers: int,
    layout: Layout,
) -> list[dict[str, Box]]:
    """Return the boxes of every rank of a unit, as its engine cuts them.

    Args:
        shapes: Of whole tensors.
        cuts: Of each of them.
        num_layers: That pipeline stages share out.
        layout: Of the unit; ranks of a stage are consecutive.
    """
    found: list[dict[str, Box]] = []
    for layers in layer_ranges(num_layers, layout.pp):
        ranks: list[dict[str, Box]] = [{} for _ in range(layout.tp)]
        for name, shape in shapes.items():
            if cuts[name].layer in layers:
                for mine, box in zip(ranks, cuts[name].boxes(shape, layout.tp), strict=True):
                    mine[name] = box
        found += ranks
    return found
