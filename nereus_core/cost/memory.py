"""Peak bytes of a model-stage on each rank of a unit: what stays, and what comes and goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from nereus_core.cost.lengths import Lengths
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import unit_shards
from nereus_core.workload import Job, ModelStage, Stage

# Activation elements kept per token, layer and hidden unit for a backward pass.
# Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", eq. 1: 34 bytes at 2 bytes
# per element, attention scores left out (fused attention does not keep them).
_ACTIVATION_ELEMENTS = 17
_FORWARD_ELEMENTS = 4  # live at once in a forward pass without backward; chosen, not measured
_LOGIT_COPIES = 3  # logits, their softmax and its gradient, in float32; chosen, not measured


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of the fullest rank of a unit."""

    resident: int
    """Held between steps."""
    transient: int
    """Held only while the stage runs."""


@lru_cache(maxsize=4096)
def _most_elements(model: ModelSpec, layout: Layout) -> int:
    """Elements of the fullest rank; exact, from the state map."""
    return max(sum(b.num_elements for b in s.values()) for s in unit_shards(model, layout))


def stage_bytes(
    job: Job, model_stage: ModelStage, layout: Layout, dp: int, lengths: Lengths
) -> StageBytes:
    """Return the bytes a model-stage needs on the fullest device of its units."""
    model, precision = job.model(model_stage), job.precision
    elements = _most_elements(model, layout)
    each = precision.train_bytes if model_stage.stage is Stage.TRAIN else precision.param_bytes
    tokens = lengths.prompt_mean + lengths.response_max
    layers = math.ceil(model.num_layers / layout.pp)
    size = precision.param_bytes
    if model_stage.stage is Stage.GENERATE:
        kv_heads = max(1.0, model.num_kv_heads / layout.tp)
        sequences = job.global_batch / dp
        transient = sequences * tokens * 2 * kv_heads * model.head_dim * layers * size
        transient += sequences * model.vocab * size
    else:
        live = job.micro_batch * tokens
        logits = live * (1 if model.head == "value" else model.vocab / layout.tp) * 4
        if model_stage.stage is Stage.TRAIN:
            flying = min(layout.pp, max(1, job.global_batch // dp // job.micro_batch))
            kept = live * model.hidden * layers * _ACTIVATION_ELEMENTS / layout.tp * flying
            transient = elements * precision.grad_bytes + kept * size + _LOGIT_COPIES * logits
        else:
            transient = live * model.hidden * _FORWARD_ELEMENTS * size + logits
    return StageBytes(elements * each, int(transient))
