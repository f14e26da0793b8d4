"""Mirror: published weights on other hosts, over torch.distributed (gloo, or nccl by way of GPUs).

Segments of shared memory are of one host. Where engines are on others, one process of each host is
a *party*: those that published send, the others write what they receive into segments of their own,
which engines there read as usual, digests and all. A host receives the cells that its engines need,
each once, however many ranks read it.

Several sources send to several hosts. All parties form one group, whatever the order in which they
come, and all handle *shipments* in one order, by the names of source and target: the earliest that
is not done can always proceed, so nobody waits in a circle (as reported in THUDM/slime#2331). Every
wait has an end, and says for whom. The end follows from the bytes that are to come before it, at
the least rate that is waited for: a party whose turn is the last waits for all others.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from nereus_adapters.rollout.segment import Segment, remove, reserve
from nereus_adapters.rollout.weights import Piece, Published, padded
from nereus_core.errors import WaitTimeout
from nereus_core.layout import Layout

_BUCKET_BYTES = 16 * 2**20
"""Largest message; chosen, not measured."""
LEAST_BYTES_PER_S = 10e6
"""Slowest network that is waited for: less than 100 Mbit/s Ethernet. Chosen, not measured."""
_LEAST_WAIT_S = 0.001
"""Of torch's wait: it takes none at all for no limit."""


def longest_s(num_bytes: int, floor_s: float, bytes_per_s: float = LEAST_BYTES_PER_S) -> float:
    """Return how long so many bytes may take.

    Args:
        num_bytes: one after another.
        floor_s: that parties may rest, whatever comes.
        bytes_per_s: least rate.
    """
    return floor_s + num_bytes / bytes_per_s


@dataclass(frozen=True, slots=True)
class Shipment:
    """Pieces that one party sends to another."""

    source: str
    target: str
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes on the way."""
        return sum(piece.num_bytes for piece in self.pieces)


def shipments(
    published: Published, at: Mapping[str, str], wanted: Mapping[str, Sequence[Layout]]
) -> tuple[Shipment, ...]:
    """Say who sends what to whom, in the order that all parties keep.

    Args:
        published: the weights.
        at: segment -> party on whose host it is.
        wanted: party -> layouts of the engines on its host; what is there already is not sent.
    """
    found: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for target, layouts in wanted.items():
        manifests = [published.manifest(layout) for layout in layouts]
        needed = {piece for m in manifests for rank in m.ranks for piece in rank}
        for piece in published.pieces:
            source = at[piece.segment]
            if piece in needed and source != target:
                found[source, target].append(piece)
    return tuple(Shipment(*pair, tuple(pieces)) for pair, pieces in sorted(found.items()))


class Party:
    """One process's place in the group.

    Args:
        name: of this party.
        names: of all, in any order.
        address: host and port of the store; the first party by name serves it.
        timeout_s: longest wait for the others to come; and that they may rest in an exchange, over
            the time that its bytes take.
        bytes_per_s: least rate of an exchange.
        backend: of the group; the same for all parties. With nccl, messages pass through the
            current CUDA device of each party's process.

    Raises:
        WaitTimeout: some did not come; names them.
    """

    def __init__(
        self,
        name: str,
        names: Iterable[str],
        address: tuple[str, int],
        *,
        timeout_s: float = 60.0,
        bytes_per_s: float = LEAST_BYTES_PER_S,
        backend: Literal["gloo", "nccl"] = "gloo",
    ) -> None:
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self.name, self._names = name, sorted(set(names))
        self._timeout_s, self._bytes_per_s = timeout_s, bytes_per_s
        self._since_s = 0.0
        """When this party's last message had gone; of its first, when the exchange began."""
        self._num_bytes = 0
        """Since then, of all parties, up to the message that is waited for."""
        wait = timedelta(seconds=timeout_s)
        rank, size = self._names.index(name), len(self._names)
        try:
            self._store = torch.distributed.TCPStore(
                *address, None, is_master=rank == 0, timeout=wait, wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            awaited = f"party {self._names[0]} to serve the store at {address[0]}:{address[1]}"
            raise WaitTimeout(awaited, timeout_s) from error
        kinds = torch.distributed
        made = kinds.ProcessGroupNCCL if backend == "nccl" else kinds.ProcessGroupGloo
        try:
            self._store.set(f"here/{name}", "yes")
            self._store.wait([f"here/{other}" for other in self._names], wait)
            self._group: Any = made(self._store, rank, size, wait)
        except RuntimeError as error:
            awaited = f"{self._late()} to join the group of {', '.join(self._names)}"
            raise WaitTimeout(awaited, timeout_s) from error

    def _late(self) -> str:
        try:
            late = [n for n in self._names if not self._store.check([f"here/{n}"])]
        except RuntimeError:  # whoever serves the store has waited as long, and gone
            return "a party that others have given up waiting for"
        return ", ".join(late) or "a party that came and left"

    def exchange(self, listed: Iterable[Shipment]) -> tuple[Piece, ...]:
        """Do this party's shipments; return the pieces it received, in a new segment of its own.

        Args:
            listed: all shipments, in any order; the same for all parties.

        Raises:
            WaitTimeout: a peer did not send or take its part; names it.
        """
        ordered = sorted(listed, key=lambda s: (s.source, s.target))
        coming = [piece for s in ordered if s.target == self.name for piece in s.pieces]
        segment = reserve(sum(padded(p.num_bytes) for p in coming)) if coming else ""
        starts = accumulate((padded(piece.num_bytes) for piece in coming), initial=0)
        made = [replace(p, segment=segment, offset=o) for p, o in zip(coming, starts, strict=False)]
        here = Segment(segment, writable=True) if made else None
        received = iter(made)
        self._since_s, self._num_bytes = time.monotonic(), 0
        try:
            for shipment in ordered:
                if shipment.source == self.name:
                    self._send(shipment)
                elif shipment.target == self.name:
                    assert here is not None
                    self._receive(shipment, [next(received) for _ in shipment.pieces], here)
                else:
                    self._num_bytes += shipment.num_bytes
        except BaseException:
            remove([segment])
            raise
        finally:
            if here is not None:
                here.close()
        return tuple(made)

    def _send(self, shipment: Shipment) -> None:
        opened: dict[str, Segment] = {}
        for piece in shipment.pieces:
            if piece.segment not in opened:
                opened[piece.segment] = Segment(piece.segment)
            content = torch.frombuffer(
                opened[piece.segment].view(piece.offset, piece.num_bytes), dtype=torch.uint8
            )
            for part in content.split(_BUCKET_BYTES):
                on_device = part.to(self._device)  # the same tensor, where that is the CPU
                self._pass(self._group.send, on_device, shipment.target, shipment)
            del content
        for segment in opened.values():
            segment.close()

    def _receive(self, shipment: Shipment, pieces: Sequence[Piece], into: Segment) -> None:
        for piece in pieces:
            content = torch.from_numpy(
                np.frombuffer(into.view(piece.offset, piece.num_bytes), np.uint8)
            )
            for part in content.split(_BUCKET_BYTES):
                on_device = torch.empty_like(part, device=self._device)
                self._pass(self._group.recv, on_device, shipment.source, shipment)
                part.copy_(on_device)
            del content

    def _pass(
        self, move: Callable[..., Any], content: torch.Tensor, peer: str, shipment: Shipment
    ) -> None:
        """Send or receive a message, in the time that all since the last take at the least rate."""
        self._num_bytes += content.numel()
        wait_s = longest_s(self._num_bytes, self._timeout_s, self._bytes_per_s)
        left_s = max(_LEAST_WAIT_S, self._since_s + wait_s - time.monotonic())
        try:
            work = move([content], self._names.index(peer), 0)
            work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:  # too late, or the peer's end of the connection has gone
            doing = "take" if peer == shipment.target else "send"
            awaited = (
                f"party {peer} to {doing} weights ({shipment.num_bytes} bytes; {self._num_bytes} "
                "with those before them)"
            )
            raise WaitTimeout(awaited, wait_s) from error
        self._since_s, self._num_bytes = time.monotonic(), 0

    def close(self) -> None:
        """Leave the group."""
        del self._group, self._store
