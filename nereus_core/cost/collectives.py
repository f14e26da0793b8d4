"""Ideal seconds of messages: the alpha-beta model of a link, ring algorithms.

Source: Thakur, Rabenseifner, Gropp (2005), "Optimization of Collective Communication Operations in
MPICH": a ring all-reduce of n ranks sends 2(n-1)/n of the bytes in 2(n-1) messages.
"""

from __future__ import annotations

import numpy as np

from nereus_core.cluster import Cluster, LinkSpec
from nereus_core.cost.op_classes import BoolArray, Column, FloatArray, OpClass, Work


def ring_s(link: LinkSpec, ranks: FloatArray, size_bytes: Column, passes: int) -> FloatArray:
    """Seconds of a ring over so many ranks; one rank sends nothing.

    Args:
        link: the slowest link that the ring crosses.
        ranks: members of the ring.
        size_bytes: bytes of the whole tensor.
        passes: 2 for all-reduce, 1 for all-gather and reduce-scatter.
    """
    hops = passes * (ranks - 1)
    return np.asarray(hops / ranks * size_bytes / link.bytes_per_s + hops * link.latency_s)


def add_all_reduce(
    work: Work,
    cluster: Cluster,
    crosses: BoolArray,
    ranks: FloatArray,
    size_bytes: Column,
    times: Column,
) -> None:
    """Add ``times`` all-reduces of so many bytes each."""
    intra_s = times * ring_s(cluster.intra_node, ranks, size_bytes, 2)
    inter_s = times * ring_s(cluster.inter_node, ranks, size_bytes, 2)
    work.add_by_link(OpClass.ALL_REDUCE_INTRA, OpClass.ALL_REDUCE_INTER, crosses, intra_s, inter_s)


def add_all_gather(
    work: Work,
    cluster: Cluster,
    crosses: BoolArray,
    ranks: FloatArray,
    size_bytes: Column,
    times: Column,
) -> None:
    """Add ``times`` all-gathers whose result has so many bytes."""
    intra_s = times * ring_s(cluster.intra_node, ranks, size_bytes, 1)
    inter_s = times * ring_s(cluster.inter_node, ranks, size_bytes, 1)
    work.add_by_link(OpClass.ALL_GATHER_INTRA, OpClass.ALL_GATHER_INTER, crosses, intra_s, inter_s)


def add_p2p(
    work: Work, cluster: Cluster, crosses: BoolArray, size_bytes: Column, times: Column
) -> None:
    """Add ``times`` messages of so many bytes each."""
    intra, inter = cluster.intra_node, cluster.inter_node
    intra_s = np.asarray(times * (size_bytes / intra.bytes_per_s + intra.latency_s))
    inter_s = np.asarray(times * (size_bytes / inter.bytes_per_s + inter.latency_s))
    work.add_by_link(OpClass.P2P_INTRA, OpClass.P2P_INTER, crosses, intra_s, inter_s)
