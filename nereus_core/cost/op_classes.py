"""OpClass: operations that share one efficiency."""

from __future__ import annotations

from enum import StrEnum


class OpClass(StrEnum):
    """What a stage's seconds are made of; efficiency = achieved / peak, in (0, 1], per class."""

    GEMM = "gemm"
    """Matrix products of layers and of the vocabulary head, bounded by FLOP/s."""
    ATTENTION = "attention"
    """Scores and values over a whole sequence (prefill, training), bounded by FLOP/s."""
    DECODE = "decode"
    """One token per sequence: weights and KV cache read once a step, bounded by memory."""
    OPTIMIZER = "optimizer"
    """Elementwise passes over parameters, gradients and moments, bounded by memory."""
    COPY = "copy"
    """Weights that a follower takes over on its own device, bounded by memory."""
    LAUNCH = "launch"
    """Starting kernels; bounded by the device's launch seconds."""
    INTRA_NODE = "intra_node"
    """Messages inside a node, bounded by its links."""
    INTER_NODE = "inter_node"
    """Messages that cross nodes."""
