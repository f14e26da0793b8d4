"""Work of one model-stage under a layout: exact arithmetic on shapes, as seconds at peak rates.

Symbols: L layers, h hidden, H heads, K kv heads, d head size, V vocabulary, B sequences of a unit,
S tokens of a sequence. A train pass costs three forward passes (forward, and twice that backward).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nereus_core.cluster import Cluster, LinkSpec
from nereus_core.cost.efficiency import CLASSES, Work
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import OpClass
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.workload import Job, ModelStage, Stage

_OPS_PER_LAYER = 14  # kernels of a decoder layer: 7 products, 2 norms, rotary, attention, gate ...


@dataclass(frozen=True, slots=True)
class Span:
    """Which links a stage's groups cross."""

    tp_crosses: bool
    pp_crosses: bool
    dp_crosses: bool


class _Tally:
    """Adds up seconds at peak per class."""

    def __init__(self, cluster: Cluster) -> None:
        self._spec, self._cluster = cluster.device_spec, cluster
        self.seconds = np.zeros(len(CLASSES))

    def flops(self, op_class: OpClass, flops: float) -> None:
        self.seconds[CLASSES.index(op_class)] += flops / self._spec.peak_flops_per_s

    def memory(self, op_class: OpClass, num_bytes: float) -> None:
        self.seconds[CLASSES.index(op_class)] += num_bytes / self._spec.memory_bytes_per_s

    def launches(self, count: float) -> None:
        self.seconds[CLASSES.index(OpClass.LAUNCH)] += count * self._spec.launch_s

    def message(self, num_bytes: float, count: float, *, crosses: bool) -> None:
        """Alpha-beta: ``count`` messages of ``num_bytes`` each, one after another."""
        link: LinkSpec = self._cluster.inter_node if crosses else self._cluster.intra_node
        where = OpClass.INTER_NODE if crosses else OpClass.INTRA_NODE
        seconds = count * (link.latency_s + num_bytes / link.bytes_per_s)
        self.seconds[CLASSES.index(where)] += seconds

    def all_reduce(self, num_bytes: float, count: float, ranks: int, *, crosses: bool) -> None:
        """Ring: 2(n-1) hops of num_bytes/n each."""
        if ranks > 1:
            self.message(num_bytes / ranks, count * 2 * (ranks - 1), crosses=crosses)


def stage_work(
    job: Job, model_stage: ModelStage, layout: Layout, dp: int, lengths: Lengths, span: Span
) -> Work:
    """Return seconds at peak per class for one step of a model-stage (one unit's critical path)."""
    tally = _Tally(job.cluster)
    model, node = job.model(model_stage), job.workload.node(model_stage)
    batch = job.global_batch / dp
    if model_stage.stage is Stage.GENERATE:
        _generate(tally, job, model, layout, batch * node.passes, lengths, span)
    else:
        _whole_sequences(tally, job, model_stage, layout, dp, batch, lengths, span)
    if node.weights_from is not None:
        held = model.num_params * job.precision.param_bytes / layout.num_devices
        tally.memory(OpClass.COPY, 2 * held)
        tally.message(held / 2, 1, crosses=span.dp_crosses)
    return tally.seconds


def _forward_flops(model: ModelSpec, layout: Layout, tokens: float) -> float:
    """FLOPs of the products of the pipeline's fullest rank over ``tokens`` tokens."""
    h, q, kv = model.hidden, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = 2 * h * q + 2 * h * kv + 3 * h * model.intermediate  # weights of one layer
    layers = math.ceil(model.num_layers / layout.pp)
    head = h * (1 if model.head == "value" else model.vocab)
    return 2 * tokens * (layers * layer + head) / layout.tp


def _attention_flops(model: ModelSpec, layout: Layout, sequences: float, tokens: float) -> float:
    """FLOPs of causal scores and values: 4 S^2/2 H d per layer and sequence."""
    layers = math.ceil(model.num_layers / layout.pp)
    per_layer = 2 * tokens**2 * model.num_heads * model.head_dim
    return sequences * layers * per_layer / layout.tp


def _whole_sequences(
    tally: _Tally,
    job: Job,
    model_stage: ModelStage,
    layout: Layout,
    dp: int,
    batch: float,
    lengths: Lengths,
    span: Span,
) -> None:
    """Training and inference: whole sequences, micro-batch after micro-batch."""
    model, trains = job.model(model_stage), model_stage.stage is Stage.TRAIN
    size, tokens = job.precision.param_bytes, lengths.total_mean
    micro = max(1.0, batch / job.micro_batch)
    bubble = (micro + layout.pp - 1) / micro  # 1F1B: pp-1 micro-batches fill and drain
    passes = 3 if trains else 1
    each = bubble * passes
    tally.flops(OpClass.GEMM, each * _forward_flops(model, layout, batch * tokens))
    tally.flops(OpClass.ATTENTION, each * _attention_flops(model, layout, batch, tokens))
    layers = math.ceil(model.num_layers / layout.pp)
    tally.launches(each * micro * layers * _OPS_PER_LAYER)
    activation = job.micro_batch * tokens * model.hidden * size
    directions = 2 if trains else 1
    tally.all_reduce(
        activation,
        bubble * micro * layers * 2 * directions,
        layout.tp,
        crosses=span.tp_crosses,
    )
    if layout.pp > 1:
        tally.message(activation, bubble * micro * directions, crosses=span.pp_crosses)
    if trains:
        held = model.num_params / layout.num_devices
        tally.all_reduce(held * job.precision.grad_bytes, 1, dp, crosses=span.dp_crosses)
        touched = 2 * job.precision.train_bytes + job.precision.grad_bytes  # read and write back
        tally.memory(OpClass.OPTIMIZER, held * touched)


def _generate(
    tally: _Tally,
    job: Job,
    model: ModelSpec,
    layout: Layout,
    batch: float,
    lengths: Lengths,
    span: Span,
) -> None:
    """Prefill, then as many decode steps as the longest response has tokens."""
    size, steps = job.precision.param_bytes, max(1.0, lengths.response_max)
    tally.flops(
        OpClass.GEMM, layout.pp * _forward_flops(model, layout, batch * lengths.prompt_mean)
    )
    tally.flops(
        OpClass.ATTENTION,
        layout.pp * _attention_flops(model, layout, batch, lengths.prompt_mean),
    )
    # A decode step passes all pipeline ranks one after another; sequences drop out as they end.
    active = batch * min(1.0, lengths.response_mean / steps)
    weights = model.num_params * size / layout.num_devices
    kv_layers = math.ceil(model.num_layers / layout.pp)
    kv_heads = max(1.0, model.num_kv_heads / layout.tp)
    context = lengths.prompt_mean + lengths.response_mean / 2
    kv = active * context * 2 * kv_heads * model.head_dim * kv_layers * size
    tally.memory(OpClass.DECODE, steps * layout.pp * (weights + kv))
    tally.flops(OpClass.GEMM, steps * layout.pp * _forward_flops(model, layout, active))
    tally.launches(steps * model.num_layers * _OPS_PER_LAYER)
    hidden = active * model.hidden * size
    tally.all_reduce(hidden, steps * model.num_layers * 2, layout.tp, crosses=span.tp_crosses)
    if layout.tp > 1:
        tally.message(active * model.vocab * size / layout.tp, steps, crosses=span.tp_crosses)
    if layout.pp > 1:
        tally.message(hidden, steps * layout.pp, crosses=span.pp_crosses)
