"""RlSettings: what the steps of a job need beside its shapes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RlSettings:
    """Hyperparameters and limits; defaults are those of the configuration."""

    seed: int = 0
    responses_per_prompt: int = 1
    temperature: float = 1.0
    eos_id: int | None = None
    clip: float = 0.2
    value_clip: float = 0.2
    kl_coef: float = 0.01
    entropy_coef: float = 0.0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    bucket_bytes: int = 16 * 2**20
    step_s: float = 3600.0
    """Longest wait for any one stage."""
    transfer_s: float = 120.0
    """Longest wait for any one phase of a transfer."""
    boundary_s: float = 600.0
    """Longest wait of a step for a boundary to close."""
