"""Losses on the last pipeline stage: from hidden states of a micro-batch to a scalar."""

from __future__ import annotations

import torch

from nereus_adapters.torch.engine.stage_model import StageModel
from nereus_adapters.torch.engine.tensor_parallel import vocab_logprobs
from nereus_adapters.torch.engine.types import Batch, LossSpec

# Sums over tokens divided by the normalizer, in this order, as a loss returns them.
METRICS = ("loss", "entropy", "kl", "clip_fraction")


def response_hidden(hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the hidden states that predict response tokens.

    Returns:
        [N, hidden] and the bool mask [B, T] at whose true places the N predictions belong.
    """
    mask = batch.response_mask
    return hidden[:, :-1][mask[:, 1:]], mask


def token_logprobs(
    model: StageModel, hidden: torch.Tensor, batch: Batch, *, entropy_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy of each response token, two tensors [N]."""
    states, mask = response_hidden(hidden, batch)
    logits = model.logits(states)
    return vocab_logprobs(
        logits, batch.tokens[mask], model.vocab_start, model.groups.tp, entropy_grad=entropy_grad
    )


@torch.no_grad()
def token_scores(model: StageModel, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return what the model's head says of each response token, [N]: log-probability or value."""
    if model.spec.head == "value":
        return model.value(response_hidden(hidden, batch)[0])
    return token_logprobs(model, hidden, batch)[0]


def loss_of(
    model: StageModel, hidden: torch.Tensor, batch: Batch, spec: LossSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scalar to minimise and float64 [len(METRICS)] for the log."""
    if spec.kind == "policy":
        return _policy(model, hidden, batch, spec)
    return _value(model, hidden, batch, spec)


def _policy(
    model: StageModel, hidden: torch.Tensor, batch: Batch, spec: LossSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = batch.response_mask
    logprob, entropy = token_logprobs(model, hidden, batch, entropy_grad=spec.entropy_coef != 0.0)
    advantage = batch.need("advantages")[mask].to(logprob.dtype)
    change = logprob - batch.need("old_logprobs")[mask].to(logprob.dtype)
    ratio = change.exp()
    plain = ratio * advantage
    clipped = ratio.clamp(1.0 - spec.clip, 1.0 + spec.clip) * advantage
    loss = -torch.minimum(plain, clipped)
    if spec.kl_coef:
        loss = loss + spec.kl_coef * _k3(batch.need("ref_logprobs")[mask].to(logprob) - logprob)
    if spec.entropy_coef:
        loss = loss - spec.entropy_coef * entropy
    return _summed(spec, loss, entropy, _k3(-change), clipped < plain)


def _value(
    model: StageModel, hidden: torch.Tensor, batch: Batch, spec: LossSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    states, mask = response_hidden(hidden, batch)
    value = model.value(states)
    target = batch.need("returns")[mask].to(value.dtype)
    old = batch.need("old_values")[mask].to(value.dtype)
    near = old + (value - old).clamp(-spec.clip, spec.clip)
    plain, clipped = (value - target).square(), (near - target).square()
    zero = torch.zeros_like(value)
    return _summed(spec, 0.5 * torch.maximum(plain, clipped), zero, zero, clipped > plain)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimate KL(p || q) from samples of p and log(q/p); never negative.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    return log_ratio.exp() - 1.0 - log_ratio


def _summed(
    spec: LossSpec, loss: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scalar = loss.sum() / spec.normalizer
    sums = [scalar.detach().double()] + [
        o.detach().double().sum() / spec.normalizer for o in others
    ]
    return scalar, torch.stack(sums)
