"""OpClass: the kinds of work that seconds are made of, and the vector that counts them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Column = FloatArray | IntArray | float
"""One number per option, or one for all."""


class OpClass(StrEnum):
    """Work whose achieved / peak is one number: its efficiency."""

    GEMM = "gemm"
    """Matrix products of decoder layers over many tokens."""
    GEMM_DECODE = "gemm_decode"
    """The same products over one token per sequence: usually bounded by reading the weights."""
    ATTENTION_PREFILL = "attention_prefill"
    ATTENTION_DECODE = "attention_decode"
    """Bounded by reading the key/value cache."""
    MEMORY_BOUND = "memory_bound"
    """Norms, activations, residuals, softmax, optimizer step."""
    HEAD = "head"
    """The product with the vocabulary."""
    ALL_REDUCE_INTRA = "all_reduce_intra"
    ALL_REDUCE_INTER = "all_reduce_inter"
    ALL_GATHER_INTRA = "all_gather_intra"
    ALL_GATHER_INTER = "all_gather_inter"
    P2P_INTRA = "p2p_intra"
    P2P_INTER = "p2p_inter"
    LAUNCH = "launch"
    """Starting kernels, as far as the kernels themselves do not hide it."""
    COPY = "copy"
    """Bytes copied on their own device."""
    HOST = "host"
    """Bytes copied between a device and its host's memory."""
    FIXED = "fixed"
    """What a stage costs whatever its size: a call to its units and back."""


CLASSES = tuple(OpClass)
INDEX: Mapping[OpClass, int] = {c: i for i, c in enumerate(CLASSES)}


class Work:
    """Ideal seconds (work / peak) per option and class; filled by adding, then read once.

    Shapes: table [num_options, num_classes].
    """

    def __init__(self, num_options: int) -> None:
        self.table: FloatArray = np.zeros((num_options, len(CLASSES)))

    def add(self, op_class: OpClass, ideal_s: Column) -> None:
        """Add ideal seconds, one per option or one for all."""
        self.table[:, INDEX[op_class]] += ideal_s

    def add_rows(self, op_class: OpClass, rows: IntArray, ideal_s: FloatArray) -> None:
        """Add ideal seconds of some options; no option may be listed twice."""
        self.table[rows, INDEX[op_class]] += ideal_s
