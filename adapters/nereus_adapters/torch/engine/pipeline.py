"""Pipeline schedules over the micro-batches of a step: 1F1B for training, a sweep for inference.

Both ends of a link know every shape beforehand (micro-batch, its width, hidden size). Sends block;
in each exchange with a neighbour the upper stage sends first and the lower stage receives first,
so that every pair of neighbours meets in the same order and no cycle of waits can arise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from nereus_adapters.torch.engine.losses import METRICS, loss_of
from nereus_adapters.torch.engine.stage_model import StageModel
from nereus_adapters.torch.engine.types import Batch, LossSpec


def train_1f1b(model: StageModel, batches: Sequence[Batch], loss: LossSpec) -> torch.Tensor:
    """Add the gradients of all micro-batches to the parameters.

    At most ``pp - pp_rank`` micro-batches are in flight on a stage. The gradients are added in
    order of the micro-batches whatever the schedule.

    Returns:
        float64 [len(METRICS)], this unit's sums; zeros on all but the last stage.

    Source: Narayanan et al. 2019, PipeDream, 1F1B; Megatron-LM's non-interleaved schedule.
    """
    stages = _Stages(model)
    metrics = torch.zeros(len(METRICS), dtype=torch.float64, device=model.device)
    flying: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
    count = len(batches)
    warm = min(model.groups.pp.size - model.groups.pp.rank - 1, count)

    def forward(index: int, received: torch.Tensor | None) -> torch.Tensor:
        batch = batches[index]
        entered = batch.tokens if received is None else received.requires_grad_()
        left = model(entered, _positions(batch))
        if model.is_last:
            left, sums = loss_of(model, left, batch, loss)
            metrics.add_(sums)
        flying.append((entered, left))
        return left

    def backward(grad: torch.Tensor | None) -> torch.Tensor | None:
        entered, left = flying.popleft()
        torch.autograd.backward(left, grad)
        return entered.grad

    for index in range(warm):
        stages.send_down(forward(index, stages.from_above(batches[index])))
    received = stages.from_above(batches[warm]) if warm < count else None
    for index in range(warm, count):
        left = forward(index, received)
        stages.send_down(left)
        grad = backward(stages.from_below(flying[0][1]))
        received = stages.from_above(batches[index + 1]) if index + 1 < count else None
        stages.send_up(grad)
    for _ in range(warm):
        stages.send_up(backward(stages.from_below(flying[0][1])))
    return metrics


@torch.no_grad()
def sweep(model: StageModel, batches: Sequence[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Run micro-batches forward only; yields each with its final hidden states, last stage only."""
    stages = _Stages(model)
    for batch in batches:
        received = stages.from_above(batch)
        left = model(batch.tokens if received is None else received, _positions(batch))
        if model.is_last:
            yield batch, left
        else:
            stages.send_down(left)


class _Stages:
    """The neighbours of a stage; at the ends of the pipeline there is nothing to exchange."""

    def __init__(self, model: StageModel) -> None:
        self._model, self._pp = model, model.groups.pp

    def from_above(self, batch: Batch) -> torch.Tensor | None:
        if self._model.is_first:
            return None
        shape = (*batch.tokens.shape, self._model.spec.hidden)
        empty = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        return self._pp.recv(empty, self._pp.rank - 1)

    def send_down(self, left: torch.Tensor) -> None:
        if not self._model.is_last:
            self._pp.send(left.detach(), self._pp.rank + 1)

    def from_below(self, left: torch.Tensor) -> torch.Tensor | None:
        if self._model.is_last:
            return None
        return self._pp.recv(torch.empty_like(left.detach()), self._pp.rank + 1)

    def send_up(self, grad: torch.Tensor | None) -> None:
        if not self._model.is_first:
            assert grad is not None
            self._pp.send(grad, self._pp.rank - 1)


def _positions(batch: Batch) -> torch.Tensor:
    return torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
