"""Tensor parallelism: two operations at the borders of a split region, and a split vocabulary.

Inside a region every rank works on its own heads, columns or vocabulary rows. `copy_to_region`
enters it, `reduce_from_region` leaves it (Shoeybi et al. 2019, Megatron-LM, fig. 3: f and g).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nereus_adapters.torch.engine.group import Group


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: the incoming gradient may also flow elsewhere.
        return ctx.group.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return group.all_reduce(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def copy_to_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a split region: identity forward, sum of the ranks' gradients backward."""
    return tensor if group.size == 1 else _Copy.apply(tensor, group)


def reduce_from_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a split region: sum of the ranks' parts forward, identity backward."""
    return tensor if group.size == 1 else _Reduce.apply(tensor, group)


class VocabEmbedding(nn.Module):
    """Rows [start, start + rows) of an embedding matrix.

    A table of rows under the name ``weight``; on a last pipeline stage it is only the tied head.
    """

    def __init__(self, rows: int, hidden: int, start: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden, device="meta"))
        self.start = start

    def forward(self, tokens: torch.Tensor, group: Group) -> torch.Tensor:
        """Look up int64 [...] tokens; returns [..., hidden], summed over the group."""
        if group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return reduce_from_region(found.masked_fill(foreign[..., None], 0.0), group)


def vocab_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    start: int,
    group: Group,
    *,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each row, without gathering logits.

    Args:
        logits: [N, rows], this rank's vocabulary rows; at least float32.
        targets: int64 [N], token ids of the whole vocabulary.
        start: first vocabulary row of this rank.
        group: ranks that share the vocabulary.
        entropy_grad: whether the entropy takes part in the backward pass (it costs a matrix).

    Returns:
        Two tensors [N], identical on every rank.
    """
    peak = group.all_reduce(logits.detach().amax(-1), "max")
    shifted = logits - peak[:, None]
    weights = shifted.exp()
    local = targets - start
    foreign = (local < 0) | (local >= logits.shape[-1])
    hit = shifted.gather(-1, local.masked_fill(foreign, 0)[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        weighted = (weights * shifted).sum(-1)
    parts = torch.stack([weights.sum(-1), hit.masked_fill(foreign, 0.0), weighted])
    total, target, weighted = reduce_from_region(parts, group)
    log_total = total.log()
    entropy = log_total - weighted / total
    return target - log_total, entropy if entropy_grad else entropy.detach()
