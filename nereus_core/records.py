"""Events written from the values they record."""

from __future__ import annotations

from nereus_core.errors import BoundaryTimeout
from nereus_core.events import DevicesChanged, InputIgnored, StepObserved, TransitionFinished
from nereus_core.observation import Observation
from nereus_core.sane import Ignored
from nereus_core.situation import Situation
from nereus_core.transition import TransitionGraph

_NAMED = 4
"""Devices that are named where many change; chosen for reading."""


def step_observed(seen: Observation, predicted_s: float) -> StepObserved:
    """Record a step beside what was predicted for it."""
    return StepObserved(
        step=seen.step,
        step_s=seen.step_s,
        predicted_s=predicted_s,
        stage_s={str(stage): seconds for stage, seconds in seen.stage_s.items()},
        response_tokens_mean=seen.response_tokens.mean,
        response_tokens_p95=seen.response_tokens.p95,
        prompt_tokens_mean=seen.prompt_tokens.mean,
        peak_bytes={str(device): size for device, size in seen.peak_bytes.items()},
        healthy=tuple(map(str, sorted(seen.healthy))),
        metrics=dict(seen.metrics),
    )


def devices_changed(step: int, before: Situation, now: Situation) -> DevicesChanged:
    """Record which devices plans may no longer, or may again, use; draining ones have left."""
    return DevicesChanged(
        step=step,
        lost=tuple(map(str, sorted(before.usable - now.usable))),
        returned=tuple(map(str, sorted(now.usable - before.usable))),
        lost_units=tuple(map(str, now.lost_units)),
    )


def input_ignored(step: int, part: Ignored, count: int) -> InputIgnored:
    """Record a part of an observation that was left out."""
    return InputIgnored(step, part.field, part.value, part.reason, count)


def supply(before: Situation, now: Situation) -> str:
    """Say how the devices that plans may use changed."""
    lost, returned = before.usable - now.usable, now.usable - before.usable
    parts = [
        f"{len(devices)} {word} ({', '.join(map(str, sorted(devices)[:_NAMED]))}"
        f"{', ...' if len(devices) > _NAMED else ''})"
        for word, devices in (("left", lost), ("came", returned))
        if devices
    ]
    parts += [f"{len(now.lost_units)} units lost"] if now.lost_units else []
    return f"devices: {', '.join(parts)}; {len(now.usable)} usable"


def refused(
    graph: TransitionGraph,
    now: Situation,
    step: int,
    predicted_s: float,
    error: BoundaryTimeout,
) -> TransitionFinished:
    """Record a transition that found no boundary: nothing has changed."""
    return TransitionFinished(
        graph.name, step, "failed", error.timeout_s, predicted_s, 0, now.plan.to_json(), str(error)
    )
