"""Advantages and returns of PPO, GRPO and ReMax, per token, aligned as in `engine.Batch`.

All tensors are [B, T]; only entries where ``mask`` is true count, others come out zero. Computed on
the driver in float64, over the whole global batch, so that no layout changes them.
"""

from __future__ import annotations

import torch

_EPS = 1e-6
"""Keeps a group of equal rewards from dividing by zero. Source: GRPO (Shao et al. 2024) as
implemented in TRL and verl."""


def token_rewards(
    scores: torch.Tensor,
    mask: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kl_coef: float,
) -> torch.Tensor:
    """Return rewards per token: the score at the last one, less a penalty for divergence.

    Args:
        scores: [B], of whole responses.
        mask: bool [B, T], response tokens; at least one per row.
        logprobs: of the sampled tokens under the policy that sampled them.
        ref_logprobs: of the same tokens under the reference.
        kl_coef: weight of the k1 estimate ``logprob - ref_logprob``.

    Source: Ziegler et al. 2019, section 2.2.
    """
    rewards = torch.where(mask, -kl_coef * (logprobs - ref_logprobs), 0.0)
    columns = torch.arange(mask.shape[1])
    last = torch.where(mask, columns, -1).amax(1)
    rewards[torch.arange(len(mask)), last] += scores
    return rewards


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns by generalised advantage estimation.

    Args:
        rewards: per token.
        values: of the state before each token.
        mask: response tokens, contiguous in each row.
        gamma: discount.
        lam: of the exponentially weighted average.

    Source: Schulman et al. 2016, eq. 16.
    """
    advantages = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards), dtype=rewards.dtype)
    after = torch.zeros(len(rewards), dtype=rewards.dtype)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * after - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, 0.0)
        after = torch.where(mask[:, t], values[:, t], 0.0)
        advantages[:, t] = running
    return advantages, torch.where(mask, advantages + values, 0.0)


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over the tokens that count."""
    picked = values[mask]
    scale = torch.rsqrt(picked.var(correction=0) + 1e-8)
    return torch.where(mask, (values - picked.mean()) * scale, 0.0)


def grpo(scores: torch.Tensor, group_size: int, mask: torch.Tensor) -> torch.Tensor:
    """Return the score of each response relative to its group, at every token of it.

    Args:
        scores: [B]; consecutive runs of ``group_size`` answer one prompt.
        group_size: responses per prompt; 1 leaves scores as they are.
        mask: response tokens.

    Source: Shao et al. 2024, section 4.1.2 (outcome supervision).
    """
    if group_size > 1:
        groups = scores.view(-1, group_size)
        centered = groups - groups.mean(1, keepdim=True)
        scores = (centered / (groups.std(1, keepdim=True) + _EPS)).flatten()
    return torch.where(mask, scores[:, None], 0.0)


def remax(rewards: torch.Tensor, baselines: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return reward to go less the score of the greedy response.

    Args:
        rewards: per token.
        baselines: [B], score of the greedy response to the same prompt.
        mask: response tokens.

    Source: Li et al. 2024, algorithm 1.
    """
    to_go = rewards.flip(1).cumsum(1).flip(1)
    return torch.where(mask, to_go - baselines[:, None], 0.0)
