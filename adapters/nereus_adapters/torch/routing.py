"""From routes to messages: who sends which regions to whom, in which order, in bounded buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest

from nereus_adapters.torch.values import Bucket, Region
from nereus_core.cluster import Device
from nereus_core.state import Box, Route, Slot


def ranks(found: Iterable[Route]) -> dict[Device, int]:
    """Number the devices that send or receive, in device order."""
    crossing = {d for r in found if not r.is_local for d in (r.source, r.target)}
    return {device: rank for rank, device in enumerate(sorted(crossing))}


def buckets(
    found: Sequence[Route],
    item_bytes: Mapping[Slot, int],
    numbering: Mapping[Device, int],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Cut what crosses between devices into messages of at most ``bucket_bytes``.

    The order is one for all seats: each handles its own messages in this order, so the earliest
    message not yet done can always proceed and no cycle of waits arises. Pairs of seats take
    turns, so that all of them work at once.

    Args:
        found: routes, local ones included (they give no message).
        item_bytes: bytes per element of each slot that moves.
        numbering: rank of each device in the transfer group.
        bucket_bytes: at least one element.
    """
    pairs: dict[tuple[int, int], list[Route]] = defaultdict(list)
    for route in found:
        if not route.is_local:
            pairs[numbering[route.source], numbering[route.target]].append(route)
    lanes = []
    for (source, target), routes in sorted(pairs.items()):
        runs = {  # slots of one width share theirs, here and where they are pickled
            each: tuple(_runs(routes, max(1, bucket_bytes // each)))
            for each in set(item_bytes.values())
        }
        lanes.append(
            [
                Bucket(source, target, slot, regions)
                for slot, each in item_bytes.items()
                for regions in runs[each]
            ]
        )
    return tuple(b for b in chain.from_iterable(zip_longest(*lanes)) if b is not None)


def _runs(routes: Iterable[Route], max_elements: int) -> Iterator[tuple[Region, ...]]:
    """Pack pieces greedily."""
    run: list[Region] = []
    size = 0
    for route in routes:
        for piece in pieces(route.box, max_elements):
            if run and size + piece.num_elements > max_elements:
                yield tuple(run)
                run, size = [], 0
            run.append((route.tensor, piece))
            size += piece.num_elements
    if run:
        yield tuple(run)


def pieces(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box along its first dimensions into boxes of at most ``max_elements``.

    >>> [b.shape for b in pieces(Box((0, 0), (3, 4)), 8)]
    [(2, 4), (1, 4)]
    """
    if box.num_elements <= max_elements:
        yield box
        return
    # The first dimension along which something can be cut: a single row is cut by its columns.
    dim = next(i for i, n in enumerate(box.shape) if n > 1)
    each = box.num_elements // box.shape[dim]
    step = max(1, max_elements // each)
    for start in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(step, box.shape[dim] - start)
        yield from pieces(Box(tuple(offset), tuple(shape)), max_elements)
