"""seen: what a finished step showed, as an Observation."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nereus_adapters.torch.rl.rollout import Rollout
from nereus_core.cluster import Device
from nereus_core.observation import Observation, TokenStats, clip_ratio
from nereus_core.workload import ModelStage

_FIGURES = ("loss", "grad_norm", "lr", "entropy", "kl", "clip_fraction")


def seen_in(
    rollout: Rollout,
    *,
    step_s: float,
    stage_s: Mapping[ModelStage, float],
    peak_bytes: Mapping[Device, int],
    healthy: Collection[Device],
    draining: Collection[Device],
    max_response_tokens: int,
    engines: Mapping[str, float],
) -> Observation:
    """Describe a rollout that was generated, scored and trained on.

    Args:
        rollout: what the step worked on.
        step_s: seconds of the step.
        stage_s: of its model-stages.
        peak_bytes: state bytes of every device at most.
        healthy: devices that are there.
        draining: devices about to leave.
        max_response_tokens: where responses are cut.
        engines: figures of rollout engines, where there are any.
    """
    assert rollout.generated is not None
    assert rollout.scores is not None
    metrics = {"reward": float(rollout.scores.mean())}
    for model, found in rollout.metrics.items():
        metrics |= {f"{model}/{name}": float(getattr(found, name)) for name in _FIGURES}
    lengths = [len(tokens) for tokens in rollout.generated.tokens]
    return Observation(
        step=rollout.step,
        step_s=step_s,
        stage_s=dict(stage_s),
        prompt_tokens=TokenStats.of([len(p.tokens) for p in rollout.prompts]),
        response_tokens=TokenStats.of(lengths),
        peak_bytes=peak_bytes,
        healthy=frozenset(healthy),
        draining=frozenset(draining),
        metrics={**metrics, **engines},
        clip_ratio=clip_ratio(lengths, max_response_tokens),
    )


def nothing_seen(
    step: int, *, healthy: Collection[Device], draining: Collection[Device]
) -> Observation:
    """Describe devices alone, between steps."""
    nothing = TokenStats.of([])
    return Observation(step, 0.0, {}, nothing, nothing, {}, frozenset(healthy), frozenset(draining))
