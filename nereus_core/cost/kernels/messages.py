"""Messages and collectives: latency per hop, bandwidth of the link, and what chunks cost between.

A collective cut into c chunks takes ``(hops + c) (latency + bytes / c / bandwidth)``; with the best
c that is ``hops * latency + bytes / bandwidth + 2 sqrt(...)``: between the latency and the
bandwidth regime seconds grow with the root of the bytes (pipelined ring; Thakur et al. 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from nereus_core.cluster import LinkSpec
from nereus_core.cost.kernels.inputs import require_rate, require_sizes
from nereus_core.cost.op_classes import Column, FloatArray


class Collective(StrEnum):
    """What a group of ranks does with a tensor."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"

    def wire(self, ranks: Column) -> FloatArray:
        """Part of the tensor that the busiest rank sends: ring, or directly to every peer."""
        if self is Collective.P2P:
            return np.ones_like(ranks, dtype=np.float64)
        passes = 2.0 if self is Collective.ALL_REDUCE else 1.0
        return np.asarray(passes * (ranks - 1.0) / np.maximum(ranks, 1.0))

    def hops(self, ranks: Column) -> FloatArray:
        """Messages that follow one another."""
        if self is Collective.P2P:
            return np.ones_like(ranks, dtype=np.float64)
        passes = 2.0 if self is Collective.ALL_REDUCE else 1.0
        return np.asarray(passes * (ranks - 1.0))


@dataclass(frozen=True, slots=True)
class MessageCurve:
    """Seconds of a collective over a kind of link."""

    start_s: float
    """Before anything moves."""
    hop_s: float
    """Per message that has to follow another."""
    bandwidth_fraction: float
    chunk_s: float
    """Extra seconds are ``sqrt(chunk_s * bytes / link peak)``: filling and draining of chunks."""
    overlap: float
    """1: latency and transfer add up; 2: they hide in one another (root of squares)."""
    source: str

    @property
    def measured(self) -> bool:
        """Whether the parameters were fitted, rather than read off a specification."""
        return self.overlap != 1

    def seconds(
        self, link: LinkSpec, what: Collective, ranks: Column, size_bytes: Column
    ) -> FloatArray:
        """Predict one call; a group of one rank takes no time.

        Args:
            link: slowest link that the group crosses.
            what: the collective.
            ranks: members of the group.
            size_bytes: bytes of the whole tensor (of the result, for an all-gather).

        Raises:
            CostInputError: a negative size or a link without bandwidth.
        """
        require_sizes("message bytes", size_bytes)
        require_rate("link bandwidth", link.bytes_per_s)
        ranks = np.asarray(ranks, dtype=np.float64)
        at_peak = what.wire(ranks) * size_bytes / link.bytes_per_s
        moving = at_peak / self.bandwidth_fraction + np.sqrt(self.chunk_s * at_peak)
        waiting = self.start_s + self.hop_s * what.hops(ranks)
        seconds = waiting + moving if self.overlap == 1 else np.hypot(waiting, moving)
        alone = (ranks <= 1) & (what is not Collective.P2P)
        return np.asarray(np.where(alone, 0.0, seconds))
