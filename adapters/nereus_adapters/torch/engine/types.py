"""Values that go into and come out of a `UnitShard`: batches, specifications, results.

Per-token tensors have the shape [B, T] of the token matrix and are aligned with it: the entry at
``[b, t]`` belongs to the prediction *of* token t, made from tokens before t. Only response tokens
(prompt_len <= t < total_len) count; entries elsewhere are zero and never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import torch

from nereus_core.errors import NereusError

Schedule = Literal["constant", "linear", "cosine"]
Storage = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""Makes an uninitialized tensor; where state comes to lie."""


def plain_storage(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor as torch does."""
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW and its learning-rate schedule; the defaults are those of torch where it has one."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Global L2 norm to which gradients are clipped; ``inf`` turns clipping off."""
    warmup_steps: int = 0
    total_steps: int = 0
    """Steps after which a linear or cosine schedule has reached zero; unused by ``constant``."""
    schedule: Schedule = "constant"


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What to minimise; every term is a sum over response tokens divided by ``normalizer``.

    ``policy``: the clipped surrogate of PPO (Schulman et al. 2017, eq. 7), plus ``kl_coef`` times
    the k3 estimate of KL(actor || reference), minus ``entropy_coef`` times the entropy.
    ``value``: half the squared error to the returns, the larger of plain and clipped.
    """

    kind: Literal["policy", "value"]
    normalizer: float
    """Response tokens of the whole global batch (all units), so that no layout changes the loss."""
    clip: float = 0.2
    """Of the probability ratio (policy), or of the change of a value (value)."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainMetrics:
    """Of one train step, over the global batch and identical on every rank of every unit."""

    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    entropy: float = 0.0
    """Mean per response token under the actor (policy only)."""
    kl: float = 0.0
    """Mean k3 estimate of KL(actor || old policy) (policy only)."""
    clip_fraction: float = 0.0
    """Part of response tokens at which the clipped branch was taken."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Responses, one per prompt, with the log-probability of each token at temperature 1."""

    tokens: list[list[int]]
    """Without the prompt; the end-of-sequence token is kept where it was produced."""
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences, padded on the right to T columns."""

    tokens: torch.Tensor
    """int64 [B, T]."""
    prompt_lens: torch.Tensor
    """int64 [B], at least 1."""
    total_lens: torch.Tensor
    """int64 [B]: prompt and response."""
    advantages: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    old_values: torch.Tensor | None = None

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Self:
        """Pad prompts and their responses into one batch."""
        rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        return cls(
            tokens,
            torch.tensor([len(p) for p in prompts]),
            torch.tensor([len(row) for row in rows]),
        )

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def response_mask(self) -> torch.Tensor:
        """Bool [B, T]: true at response tokens."""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (at >= self.prompt_lens[:, None]) & (at < self.total_lens[:, None])

    def rows(self, start: int, stop: int) -> Self:
        """Return some sequences, without the columns that are padding in all of them."""
        width = int(self.total_lens[start:stop].max()) if stop > start else 0
        picked = {
            f.name: value[start:stop, :width] if value.dim() == 2 else value[start:stop]
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **picked)

    def micro_batches(self, size: int) -> list[Self]:
        """Cut into runs of ``size`` sequences; the last may be shorter."""
        return [self.rows(i, min(i + size, len(self))) for i in range(0, len(self), size)]

    def to(self, device: torch.device) -> Self:
        """Return the same batch on another device."""
        moved = {
            f.name: value.to(device)
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **moved)

    def need(self, name: str) -> torch.Tensor:
        """Return an optional tensor; raises NereusError naming it when it is absent."""
        value: torch.Tensor | None = getattr(self, name)
        if value is None:
            raise NereusError(f"batch has no {name}; this loss needs it, fill it in first.")
        return value
