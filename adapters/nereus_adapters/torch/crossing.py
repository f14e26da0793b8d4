"""Crossing: one seat's side when buckets cross: read out of a neighbor's memory, or sent.

Both ways give the same: every region in its place, and for every bucket a digest of what left and
one of what arrived, which must be equal.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
import xxhash

from nereus_adapters.torch.accountant import Accountant
from nereus_adapters.torch.engine import Group
from nereus_adapters.torch.exchange import Garbled, Locate, Spoils, exchange, flip
from nereus_adapters.torch.reading import Spot, digest, fetch, own_window, spot
from nereus_adapters.torch.values import Bucket, Offer, Ways
from nereus_core.state import Slot

Digests = Mapping[int, tuple[int, ...]]
"""Rank of the other seat -> digests of the buckets between the two, in their order."""


_MOST_THREADS = 4
"""Of one seat that reads: past a few the memory of a machine is the limit. Chosen, not measured."""


class Crossing:
    """What one seat sends and receives, in the order that holds for all seats.

    Args:
        rank: of this seat.
        buckets: those it is source or target of.
        read: finds a region that leaves.
        write: finds the place of a region that arrives.
        dtypes: of what arrives.
        device: where state lies; only a CPU's memory can be read by others.
        accountant: told of message buffers.
    """

    def __init__(
        self,
        rank: int,
        buckets: Sequence[Bucket],
        read: Locate,
        write: Locate,
        dtypes: Callable[[Slot], torch.dtype],
        device: torch.device,
        accountant: Accountant,
    ) -> None:
        self._rank, self._buckets = rank, buckets
        self._read, self._write, self._dtypes = read, write, dtypes
        self._device, self._accountant = device, accountant
        self._arrived: dict[int, list[int]] = {}
        self._wrong: list[Bucket] = []
        self._ahead: ThreadPoolExecutor | None = None
        self._early: dict[int, Future[int]] = {}
        """Digests of buckets that leave, by identity; from when state is held still on."""
        self._views: dict[int, list[torch.Tensor]] = {}
        """Regions of buckets that leave, by identity; from the offer until they have crossed."""

    def offer(self) -> Offer:
        """Say where others find what they need of this seat."""
        window = own_window() if self._device.type == "cpu" else None
        spots: dict[int, list[Spot]] = defaultdict(list)
        if window is not None:
            for bucket in self._leaving():
                self._views[id(bucket)] = views = self._leaving_views(bucket)
                spots[bucket.target] += map(spot, views)
        return Offer(window, {target: tuple(found) for target, found in spots.items()})

    def digest_ahead(self) -> None:
        """Begin to digest what others will read here, while they make room for it.

        For a seat whose state does not change before `cross`.
        """
        leaving = list(self._leaving())
        if not leaving or own_window() is None or self._device.type != "cpu":
            return
        self._ahead = ThreadPoolExecutor(1)
        self._early = {id(bucket): self._ahead.submit(self._left, bucket) for bucket in leaving}

    def forget(self) -> None:
        """Give up what was begun ahead and is not needed any more."""
        if self._ahead is not None:
            self._ahead.shutdown(cancel_futures=True)
            self._ahead = None
        self._early.clear()
        self._views.clear()

    def check_ways(self, ways: Ways) -> None:
        """Raise Unreadable when a neighbor's memory cannot be read."""
        for arrival in ways.arrivals.values():
            arrival.window.check()

    def cross(self, ways: Ways, group: Group | None, spoils: Spoils = lambda: False) -> Digests:
        """Move every bucket; return the digests of those that others read here.

        Args:
            ways: how.
            group: for what is not read.
            spoils: whether the bucket that has just arrived is to be changed, for tests.

        Raises:
            PeerLost, WaitTimeout: another seat is gone or late.
        """
        self._arrived, self._wrong = defaultdict(list), []
        left: dict[int, list[int]] = defaultdict(list)
        spots = {source: iter(a.spots) for source, a in ways.arrivals.items()}
        near: list[tuple[Bucket, tuple[Spot, ...]]] = []
        leaving: list[Bucket] = []
        sent: list[Bucket] = []
        for bucket in self._buckets:
            if bucket.source in ways.arrivals:
                near.append((bucket, tuple(islice(spots[bucket.source], len(bucket.regions)))))
            elif bucket.target in ways.readers:
                leaving.append(bucket)
            else:
                sent.append(bucket)
        with ThreadPoolExecutor(_threads(ways) if near else 1) as threads:
            arriving = threads.map(partial(self._fetched, ways), near)
            late = [bucket for bucket in leaving if id(bucket) not in self._early]
            digests = dict(zip(map(id, late), threads.map(self._left, late), strict=True))
            for bucket in leaving:
                early = self._early.get(id(bucket))
                left[bucket.target].append(digests[id(bucket)] if early is None else early.result())
            for (bucket, _), came in zip(near, arriving, strict=True):
                found = self._spoiled(bucket) if spoils() else came
                self._arrived[bucket.source].append(found)
        if group is not None:
            self._wrong = exchange(
                group, sent, self._read, self._write, self._dtypes, self._device, self._accountant,
                spoils,
            )  # fmt: skip
        self._views.clear()  # before commit: what ends then is not held here
        return {target: tuple(found) for target, found in left.items()}

    def _fetched(self, ways: Ways, arrival: tuple[Bucket, tuple[Spot, ...]]) -> int:
        """Read a bucket out of another process; return the digest of what arrived."""
        bucket, spots = arrival
        views = [self._write(bucket.slot, name, box) for name, box in bucket.regions]
        found = xxhash.xxh3_64()
        with self._packed(views):
            fetch(ways.arrivals[bucket.source].window, zip(spots, views, strict=True), found)
        return found.intdigest()

    def _left(self, bucket: Bucket) -> int:
        """Return the digest of a bucket that others read."""
        views = self._views.get(id(bucket)) or self._leaving_views(bucket)
        found = xxhash.xxh3_64()
        with self._packed(views):
            for view in views:
                digest(view, found)
        return found.intdigest()

    def _leaving_views(self, bucket: Bucket) -> list[torch.Tensor]:
        return [self._read(bucket.slot, name, box) for name, box in bucket.regions]

    @contextmanager
    def _packed(self, views: Sequence[torch.Tensor]) -> Iterator[None]:
        """Count the copies in which regions that are not contiguous are digested, one at a time."""
        extra = max((0 if view.is_contiguous() else view.nbytes for view in views), default=0)
        self._accountant.take(extra)
        try:
            yield
        finally:
            self._accountant.drop(extra)

    def _spoiled(self, bucket: Bucket) -> int:
        """Change a bucket where it has arrived, and digest what is there then."""
        found = xxhash.xxh3_64()
        views = [self._write(bucket.slot, name, box) for name, box in bucket.regions]
        flip(views[0])
        for view in views:
            digest(view, found)
        return found.intdigest()

    def verify(self, left: Digests) -> None:
        """Compare what arrived with what left, as the seats it left from say.

        Raises:
            Garbled: a bucket arrived changed, or a seat does not say what it sent.
        """
        for source, arrived in self._arrived.items():
            came = [b for b in self._buckets if b.source == source]
            said: Iterable[int | None] = left.get(source) or [None] * len(came)
            for bucket, mine, theirs in zip(came, arrived, said, strict=True):
                if mine != theirs:
                    raise Garbled(bucket)
        if self._wrong:
            raise Garbled(self._wrong[0])

    def _leaving(self) -> Iterable[Bucket]:
        return (b for b in self._buckets if b.source == self._rank)


def _threads(ways: Ways) -> int:
    """Share the processors of this host among the seats that read or are read on it."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, ways.near_readers)))
