"""What a pass through a model costs beside its matrix products: kernels started, bytes moved."""

from __future__ import annotations

import numpy as np

from nereus_core.cost.op_classes import FloatArray, OpClass, Work
from nereus_core.cost.shapes import RankShapes
from nereus_core.model import ModelSpec
from nereus_core.workload import Job

KERNELS_PER_LAYER = 17
"""Counted in transformers' LlamaDecoderLayer: 2 norms, q k v, 2 rotary, 2 cache, attention, o,
gate, up, activation, product, down, 2 residuals, 1 reshape copy."""
KERNELS_PER_PASS = 6
"""Embedding, masks, final norm, head, softmax, gather: counted likewise."""


def elementwise(model: ModelSpec, shapes: RankShapes) -> FloatArray:
    """Elements that cross memory per token and layer between matrix products.

    Two norms (read, write) and two residuals (two reads, a write) over h; rotary over q and k;
    activation and product over the intermediate size (three each way).
    """
    wide = (2 * 2 + 2 * 3) * model.hidden * (1.0 if model.norm_style == "pre" else 1.4)
    return np.asarray(wide + 2 * (shapes.query + shapes.kv) + 5 * shapes.intermediate)


def add_launches(work: Work, job: Job, kernels: FloatArray) -> None:
    """Add the launches that kernels do not hide: launching runs ahead of the device."""
    launching = kernels * job.cluster.device_spec.launch_s
    work.add(OpClass.LAUNCH, np.maximum(0.0, launching - work.table.sum(axis=1)))
