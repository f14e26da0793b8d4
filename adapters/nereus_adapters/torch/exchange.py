"""Buckets on the wire: a few in flight, each with a digest that the receiver checks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import xxhash

from nereus_adapters.torch.accountant import Accountant
from nereus_adapters.torch.engine import Group
from nereus_adapters.torch.values import Bucket
from nereus_core.errors import NereusError
from nereus_core.state import Box, Slot

Locate = Callable[[Slot, str, Box], torch.Tensor]
"""Returns a view of the storage of a region."""

Spoils = Callable[[], bool]
"""Says whether the bucket that has just arrived is to be changed: a fault, for tests."""

WINDOW = 4
"""Messages of one seat in flight; bounds its buffers. Chosen, not measured."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Garbled(NereusError):
    """A bucket arrived with other bytes than were sent."""

    def __init__(self, bucket: Bucket) -> None:
        name, box = bucket.regions[0]
        super().__init__(
            f"{bucket.slot}/{name} at {box.offset} arrived changed "
            f"(rank {bucket.source} to rank {bucket.target}); nothing was committed."
        )


def exchange(
    group: Group,
    buckets: Sequence[Bucket],
    read: Locate,
    write: Locate,
    dtypes: Callable[[Slot], torch.dtype],
    device: torch.device,
    accountant: Accountant,
    spoils: Spoils = lambda: False,
) -> list[Bucket]:
    """Send and receive this rank's buckets.

    A bucket of one contiguous region is sent from, or received into, its storage; others are
    packed. At most WINDOW packed buckets exist at once.

    Returns:
        Buckets whose digest does not fit (none, unless memory or network is broken).
    """
    digests: dict[int, list[tuple[Bucket, torch.Tensor]]] = {}
    flying: deque[Callable[[], None]] = deque()
    for bucket in buckets:
        if len(flying) == WINDOW:
            flying.popleft()()
        if bucket.source == group.rank:
            flat = packed(bucket, read)
            extra = 0 if _lies_in_one(bucket, read) else flat.nbytes
            accountant.take(extra)
            digests.setdefault(bucket.target, []).append((bucket, digest(flat)))
            wait = group.isend(flat, bucket.target)
            flying.append(_keeping(wait, flat, partial(accountant.drop, extra)))
        else:
            dtype = dtypes(bucket.slot)
            flying.append(
                _receive(group, bucket, write, dtype, device, digests, accountant, spoils)
            )
    while flying:
        flying.popleft()()
    return _compare(group, digests)


def _receive(
    group: Group,
    bucket: Bucket,
    write: Locate,
    dtype: torch.dtype,
    device: torch.device,
    digests: dict[int, list[tuple[Bucket, torch.Tensor]]],
    accountant: Accountant,
    spoils: Spoils,
) -> Callable[[], None]:
    views = [write(bucket.slot, name, box) for name, box in bucket.regions]
    direct = len(views) == 1 and views[0].is_contiguous()
    total = sum(view.numel() for view in views)
    flat = views[0].view(-1) if direct else accountant.empty((total,), dtype, device)
    arrived = group.irecv(flat, bucket.source)

    def finish() -> None:
        arrived()
        if spoils():
            flip(flat)
        digests.setdefault(bucket.source, []).append((bucket, digest(flat)))
        if not direct:
            start = 0
            for view in views:
                view.copy_(flat[start : start + view.numel()].view(view.shape))
                start += view.numel()
            accountant.drop(flat.nbytes)

    return finish


def _keeping(
    wait: Callable[[], None], flat: torch.Tensor, dropped: Callable[[], None]
) -> Callable[[], None]:
    """Hold a buffer until it has gone."""

    def finish() -> None:
        wait()
        del held[:]
        dropped()

    held = [flat]
    return finish


def _lies_in_one(bucket: Bucket, read: Locate) -> bool:
    """Whether a bucket is sent from the storage of its only region."""
    views = [read(bucket.slot, name, box) for name, box in bucket.regions]
    return len(views) == 1 and views[0].is_contiguous()


def _compare(group: Group, digests: dict[int, list[tuple[Bucket, torch.Tensor]]]) -> list[Bucket]:
    """Exchange digests with every peer, lower rank first in each pair; return what differs."""
    wrong: list[Bucket] = []
    for peer in sorted(digests):
        sent = [d for b, d in digests[peer] if b.source == group.rank]
        got = [(b, d) for b, d in digests[peer] if b.target == group.rank]

        def send_mine(peer: int = peer, sent: list[torch.Tensor] = sent) -> None:
            if sent:
                group.send(torch.stack(sent), peer)

        def check_theirs(peer: int = peer, got: list[tuple[Bucket, torch.Tensor]] = got) -> None:
            if got:
                mine = torch.stack([d for _, d in got])
                theirs = group.recv(torch.empty_like(mine), peer)
                for (bucket, _), same in zip(got, (mine == theirs).all(1).tolist(), strict=True):
                    if not same:
                        wrong.append(bucket)

        for turn in (send_mine, check_theirs) if group.rank < peer else (check_theirs, send_mine):
            turn()
    return wrong


def flip(view: torch.Tensor) -> None:
    """Change one element."""
    first = (0,) * view.dim()
    view[first] = torch.where(view[first] == 0, torch.ones_like(view[first]), -view[first])


def packed(bucket: Bucket, read: Locate) -> torch.Tensor:
    """Return a bucket's elements in order; a view where one contiguous region is all of it."""
    flats = [read(bucket.slot, name, box).reshape(-1) for name, box in bucket.regions]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def digest(flat: torch.Tensor) -> torch.Tensor:
    """Return int64 [2] of a flat tensor's bits.

    On the CPU XXH3 of 128 bits. On CUDA Fletcher's checksum over machine words (their sum, and
    their sum weighted by position, modulo 2^64): no copy to the host.
    """
    if flat.device.type == "cpu":
        summed = xxhash.xxh3_128(flat.view(torch.uint8).numpy()).digest()
        return torch.frombuffer(bytearray(summed), dtype=torch.int64)
    words = flat.view(_WORDS[flat.element_size()]).long()
    weights = torch.arange(1, len(words) + 1, device=flat.device)
    return torch.stack([words.sum(), (words * weights).sum()])
