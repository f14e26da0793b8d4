"""AdamW on plain tensors, its learning-rate schedule, and the clipping factor."""

from __future__ import annotations

import math

import torch

from nereus_adapters.torch.engine.types import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Return the rate of the update number ``step`` (from 0); no state but the step count."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    span = max(1, spec.total_steps - spec.warmup_steps)
    done = min(1.0, (step - spec.warmup_steps) / span)
    if spec.schedule == "linear":
        return spec.lr * (1.0 - done)
    return spec.lr * 0.5 * (1.0 + math.cos(math.pi * done))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what gradients are multiplied by; as `torch.nn.utils.clip_grad_norm_`."""
    return min(1.0, max_norm / (norm + 1e-6))


@torch.no_grad()
def adamw_step(
    spec: OptimizerSpec,
    step: int,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> None:
    """Update a parameter and its moments in place; the same arithmetic as `torch.optim.AdamW`.

    Args:
        spec: rate, betas, eps and decay.
        step: updates done before this one.
        param: of any floating dtype; where the moments are wider, the update is made in theirs.
        grad: of the parameter's shape.
        exp_avg: first moment.
        exp_avg_sq: second moment.

    Source: Loshchilov and Hutter 2019, algorithm 2.
    """
    lr, (beta1, beta2) = learning_rate(spec, step), spec.betas
    wide = param.to(exp_avg.dtype)
    grad = grad.to(exp_avg.dtype)
    wide.mul_(1.0 - lr * spec.weight_decay)
    exp_avg.lerp_(grad, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    corrected = (exp_avg_sq.sqrt() / math.sqrt(1.0 - beta2 ** (step + 1))).add_(spec.eps)
    wide.addcdiv_(exp_avg, corrected, value=-lr / (1.0 - beta1 ** (step + 1)))
    if wide is not param:
        param.copy_(wide)
