"""How long simulated stages take, how much memory they need for a moment, how long responses are.

A roofline with one efficiency: enough for plans to differ in the right direction, no more. The cost
model is not used here on purpose: a controller must not be tested against its own predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nereus_core.cluster import Device
from nereus_core.sim.training import mixed
from nereus_core.state import unit_shards
from nereus_core.units import Unit
from nereus_core.workload import Job, Stage

EFFICIENCY = 0.4
"""Of peak FLOP/s and bandwidth, in every stage; chosen, not measured."""
_FLOPS_PER_TOKEN = {Stage.GENERATE: 2, Stage.INFER: 2, Stage.TRAIN: 6}
"""Per parameter; Kaplan et al. 2020, section 2.1: 2 forward, 4 backward."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a simulated job does that a real one would have learned to do."""

    seed: int = 0
    response_tokens: Callable[[int], float] = lambda step: 32.0
    """Mean response length by RL step; single responses lie within a quarter of it."""

    def response(self, job: Job, step: int, sample_id: int) -> int:
        """Return the tokens of one response, never more than the job allows."""
        spread = 1 + mixed(self.seed, step, sample_id, 1) / (1 << 22)
        tokens = round(self.response_tokens(step) * spread)
        return max(1, min(job.max_response_tokens, tokens))

    def prompt(self, job: Job, sample_id: int) -> int:
        """Return the tokens of one prompt: between half of the longest and the longest."""
        part = 0.75 + mixed(self.seed, sample_id, 2) / (1 << 22)
        return max(1, round(job.max_prompt_tokens * part))


def unit_seconds(job: Job, unit: Unit, tokens: Sequence[tuple[int, int]], passes: int) -> float:
    """Return the seconds of one unit in one stage.

    Args:
        job: shapes and device rates.
        unit: who works.
        tokens: (prompt, response) of every sample it works on.
        passes: how often the stage runs.
    """
    spec, stage = job.cluster.device_spec, unit.model_stage.stage
    params = job.model(unit.model_stage).num_params
    work = _FLOPS_PER_TOKEN[stage] * params * sum(p + r for p, r in tokens)
    seconds = work / (len(unit.devices) * spec.peak_flops_per_s * EFFICIENCY)
    if stage is Stage.GENERATE:
        # Each decoded token reads all weights once; pipeline ranks take turns, tensor ranks share.
        read = params * job.precision.param_bytes / unit.layout.tp
        step_s = read / (spec.memory_bytes_per_s * EFFICIENCY) + spec.launch_s
        seconds += max((r for _, r in tokens), default=0) * step_s
    return passes * seconds


def transient_bytes(
    job: Job, unit: Unit, tokens: Sequence[tuple[int, int]]
) -> Mapping[Device, int]:
    """Return the bytes a unit needs while its stage runs, by device: gradients, or a KV cache."""
    model, layout = job.model(unit.model_stage), unit.layout
    match unit.model_stage.stage:
        case Stage.TRAIN:
            shards = unit_shards(model, layout)
            each = [
                job.precision.grad_bytes * sum(b.num_elements for b in s.values()) for s in shards
            ]
        case Stage.GENERATE:
            # keys and values of every layer: 2 * L * K * d per token, cut by pp and by tp up to K
            cut = layout.pp * min(layout.tp, model.num_kv_heads)
            per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
            cache = per_token * job.precision.param_bytes * sum(p + r for p, r in tokens) // cut
            each = [cache] * layout.num_devices
        case Stage.INFER:
            each = [0] * layout.num_devices
    return dict(zip(unit.devices, each, strict=True))
