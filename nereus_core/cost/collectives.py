"""Ideal seconds of messages, added to the class of the link they cross.

Ideal is at the fraction of the link's bandwidth that its curve reaches (`kernels.messages`): the
class's prior efficiency. A link nobody measured has the alpha-beta model of its specification.
"""

from __future__ import annotations

import numpy as np

from nereus_core.cluster import Cluster, LinkSpec
from nereus_core.cost.kernels import Collective, message_curve
from nereus_core.cost.op_classes import BoolArray, Column, FloatArray, IntArray, OpClass, Work


def message_s(link: LinkSpec, what: Collective, ranks: Column, size_bytes: Column) -> FloatArray:
    """Ideal seconds of one collective of so many ranks over a link."""
    curve = message_curve(what, link)
    return curve.seconds(link, what, ranks, size_bytes) * curve.bandwidth_fraction


def add_all_reduce(
    work: Work,
    cluster: Cluster,
    crosses: BoolArray,
    ranks: FloatArray,
    size_bytes: Column,
    times: Column,
) -> None:
    """Add ``times`` all-reduces of so many bytes each, per option or [..., options] summed up."""
    classes = OpClass.ALL_REDUCE_INTRA, OpClass.ALL_REDUCE_INTER
    _add(work, cluster, classes, Collective.ALL_REDUCE, crosses, ranks, size_bytes, times)


def add_all_gather(
    work: Work,
    cluster: Cluster,
    crosses: BoolArray,
    ranks: FloatArray,
    size_bytes: Column,
    times: Column,
) -> None:
    """Add ``times`` all-gathers whose result has so many bytes."""
    classes = OpClass.ALL_GATHER_INTRA, OpClass.ALL_GATHER_INTER
    _add(work, cluster, classes, Collective.ALL_GATHER, crosses, ranks, size_bytes, times)


def add_p2p(
    work: Work, cluster: Cluster, crosses: BoolArray, size_bytes: Column, times: Column
) -> None:
    """Add ``times`` messages of so many bytes each."""
    classes = OpClass.P2P_INTRA, OpClass.P2P_INTER
    _add(work, cluster, classes, Collective.P2P, crosses, 2.0, size_bytes, times)


def _add(
    work: Work,
    cluster: Cluster,
    classes: tuple[OpClass, OpClass],
    what: Collective,
    crosses: BoolArray,
    ranks: Column,
    size_bytes: Column,
    times: Column,
) -> None:
    some = np.asarray(times) != 0
    sent = some.any(axis=0) if some.ndim > 1 else some
    if what is not Collective.P2P:
        sent = sent & (np.asarray(ranks) > 1)
    for link, op_class, on in (
        (cluster.intra_node, classes[0], sent & ~crosses),
        (cluster.inter_node, classes[1], sent & crosses),
    ):
        rows = np.flatnonzero(on)
        if len(rows):
            each = message_s(link, what, _of(ranks, rows), _of(size_bytes, rows))
            work.add_rows(op_class, rows, _per_option(_of(times, rows) * each))


def _of(column: Column, rows: IntArray) -> Column:
    """Some options of a column, or the one number for all."""
    return column[..., rows] if isinstance(column, np.ndarray) and column.ndim else column


def _per_option(seconds: FloatArray) -> FloatArray:
    return np.asarray(seconds.sum(axis=0) if seconds.ndim > 1 else seconds)
