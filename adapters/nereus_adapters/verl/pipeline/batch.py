"""batch: one stage's part in a batch, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nereus_adapters.verl.pipeline.link import Link
from nereus_adapters.verl.pipeline.schedule import Way, one_forward_one_backward

Computed = tuple[torch.Tensor, dict[str, Any]]
"""Loss and outputs of a micro-batch, of the last stage alone."""


class Passes(Protocol):
    """What a stage computes, as an engine knows how to."""

    def finish(self, micro_batch: Any) -> Computed:
        """Run the last stage on a micro-batch."""

    def pass_on(self, micro_batch: Any) -> None:
        """Run another stage on a micro-batch; what leaves it is at the link's ``leaves``."""

    def backward_of(self, index: int) -> AbstractContextManager[None]:
        """Surround the backward pass of a micro-batch."""


@dataclass(slots=True)
class _Flight:
    """A micro-batch between its two passes."""

    came: torch.Tensor | None
    leaves: torch.Tensor
    """Its loss, in the last stage."""


def run(
    link: Link,
    stage: int,
    stages: int,
    micro_batches: Sequence[Any],
    passes: Passes,
    *,
    forward_only: bool,
) -> list[dict[str, Any]]:
    """Run all micro-batches; returns the last stage's outputs, and nothing of another stage."""
    flights: dict[int, _Flight] = {}
    outputs: list[dict[str, Any]] = []

    def forward(index: int) -> None:
        if stage == stages - 1:
            leaves, output = passes.finish(micro_batches[index])
            outputs.append(output)
        else:
            passes.pass_on(micro_batches[index])
            leaves = link.leaving()
            link.send(leaves)
        came = link.clear()
        if not forward_only:
            flights[index] = _Flight(came, leaves)

    def backward(index: int) -> None:
        flight = flights.pop(index)
        with passes.backward_of(index):
            if stage == stages - 1:
                flight.leaves.backward()
            else:
                flight.leaves.backward(link.receive_back(flight.leaves))
        if flight.came is not None:
            assert flight.came.grad is not None
            link.send_back(flight.came.grad)

    for way, index in _order(stage, stages, len(micro_batches), forward_only=forward_only):
        (forward if way is Way.FORWARD else backward)(index)
    link.settle()
    return outputs


def _order(
    stage: int, stages: int, micro_batches: int, *, forward_only: bool
) -> Iterable[tuple[Way, int]]:
    if forward_only:
        return ((Way.FORWARD, index) for index in range(micro_batches))
    return one_forward_one_backward(stage, stages, micro_batches)
