"""schedule: the order in which one stage computes its micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum


class Way(Enum):
    """Through the stages."""

    FORWARD = "forward"
    BACKWARD = "backward"


def one_forward_one_backward(
    stage: int, stages: int, micro_batches: int
) -> Iterator[tuple[Way, int]]:
    """Yield what a stage computes: each micro-batch forward, and backward as soon as may be.

    A stage holds the activations of at most ``stages - stage`` micro-batches at once.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (SC 2021), section 2.2.1.

    >>> [f"{way.value[0]}{index}" for way, index in one_forward_one_backward(0, 2, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = min(stages - stage - 1, micro_batches)
    for index in range(ahead):
        yield Way.FORWARD, index
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Way.FORWARD, index + ahead
        yield Way.BACKWARD, index
