"""Micro-batched passes over whole sequences: forward only, or forward, backward and the update.

In two steps, so that a fit prices the same counts many times: `Passes` counts exactly what a layout
makes a device do, `price` turns counts into ideal seconds per class. A pipeline runs one forward,
one backward (1F1B): m micro-batches take the time of m + pp - 1 on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from nereus_core.cluster import Cluster
from nereus_core.cost.collectives import add_all_gather, add_all_reduce, add_p2p
from nereus_core.cost.curves import Curves, exposed
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import INDEX, BoolArray, FloatArray, OpClass, Work
from nereus_core.cost.passes import KERNELS_PER_LAYER, KERNELS_PER_PASS, elementwise
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.workload import Job, ModelStage, Stage

_BACKWARD = 2
"""A backward pass costs two forward passes (Kaplan et al. 2020, section 2.1)."""
_COMPUTE = tuple(
    INDEX[c] for c in (OpClass.GEMM, OpClass.ATTENTION_PREFILL, OpClass.MEMORY_BOUND, OpClass.HEAD)
)


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """What the busiest device of a unit does in one step; one row per option.

    Layer figures are of one forward pass of one micro-batch through the rank's layers.
    """

    micro_batches: FloatArray
    rounds: FloatArray
    """Micro-batches, and the filling and draining of the pipeline."""
    layer_passes: FloatArray
    """Forward passes that a micro-batch costs in layers: 1, 3 with backward, 4 recomputing."""
    head_passes: FloatArray
    sums: FloatArray
    """All-reduces over tp per micro-batch, all passes."""
    tokens: FloatArray
    width: FloatArray
    """Hidden size / tp."""
    flops: FloatArray
    weight_bytes: FloatArray
    attention_flops: FloatArray
    moved_bytes: FloatArray
    """Between matrix products."""
    head_flops: FloatArray
    head_bytes: FloatArray
    kernels: FloatArray
    boundary_bytes: FloatArray
    """Activations between two pipeline ranks, and what an all-reduce over tp sums."""
    messages: FloatArray
    """To the next pipeline rank and back, per micro-batch."""
    tp: FloatArray
    dp: FloatArray
    tp_rails: FloatArray
    """Members of a ring inside a node where it crosses nodes: each brings its own link out."""
    dp_rails: FloatArray
    tp_crosses: BoolArray
    pp_crosses: BoolArray
    dp_crosses: BoolArray
    gradient_bytes: FloatArray
    gathered_bytes: FloatArray
    """Parameters gathered after an update whose optimizer is sharded over dp, else 0."""
    touched_bytes: FloatArray
    """By the optimizer."""

    @classmethod
    def of(
        cls,
        job: Job,
        stage: ModelStage,
        options: Options,
        shapes: RankShapes,
        lengths: Lengths,
    ) -> Self:
        """Count the work of a training or inferring model-stage, by option."""
        model, precision, each = job.model(stage), job.precision, job.precision.param_bytes
        trains = stage.stage is Stage.TRAIN
        recomputes = trains and job.recompute == "full"
        one = np.ones(len(options))
        sequences = job.global_batch / options.dp
        micro_batches = np.ceil(sequences / job.micro_batch)
        tokens = sequences * lengths.total_mean / micro_batches
        layers = shapes.layers
        # Causal attention: scores and their use, 2 * 2 * (H/tp) * d * T^2 / 2 FLOPs per sequence.
        squares = lengths.total_square * sequences / micro_batches
        has_head = float(model.head == "lm")
        head_passes = 1 + _BACKWARD * trains
        # Two per layer and pass (attention and MLP outputs), and one for the embeddings; a
        # backward pass has as many as a forward pass.
        sums = 2 * layers * (1 + trains + recomputes) + 1 + trains
        sharded = trains and job.sharded_optimizer
        owned = shapes.params / (options.dp if sharded else 1.0)
        return cls(
            micro_batches=micro_batches,
            rounds=np.asarray(micro_batches + options.pp - 1, dtype=np.float64),
            layer_passes=one * (1 + _BACKWARD * trains + recomputes),
            head_passes=one * head_passes,
            sums=sums,
            tokens=tokens,
            width=model.hidden / options.tp,
            flops=2 * shapes.matrix * layers * tokens,
            weight_bytes=shapes.matrix * layers * each,
            attention_flops=2 * shapes.query * squares * layers,
            moved_bytes=elementwise(model, shapes) * each * tokens * layers,
            head_flops=2 * model.hidden * shapes.vocab * tokens * has_head,
            # Logits in float32: written, read for the maximum, the sum and the pick.
            head_bytes=16 * shapes.vocab * tokens * has_head,
            kernels=KERNELS_PER_LAYER * layers + KERNELS_PER_PASS,
            boundary_bytes=tokens * model.hidden * each,
            messages=np.where(options.pp > 1, 1.0 + trains, 0.0).astype(np.float64),
            tp=options.tp.astype(np.float64),
            dp=options.dp.astype(np.float64),
            tp_rails=_tp_rails(job.cluster, options),
            dp_rails=one * (1.0 if options.dp_rails is None else options.dp_rails),
            tp_crosses=options.tp_crosses,
            pp_crosses=options.pp_crosses,
            dp_crosses=options.dp_crosses,
            gradient_bytes=shapes.params * precision.grad_bytes * trains,
            gathered_bytes=shapes.params * each * sharded,
            # Parameters, both moments and the master copy are read and written, gradients read.
            touched_bytes=owned * (2 * precision.train_bytes + precision.grad_bytes) * trains,
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Put the rows of several jobs below one another."""
        return cls(
            **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)}
        )

    def rows(self, at: FloatArray | BoolArray) -> Self:
        """Some of the rows."""
        return type(self)(**{f.name: getattr(self, f.name)[at] for f in fields(self)})


def _tp_rails(cluster: Cluster, options: Options) -> FloatArray:
    """Ranks of one tensor-parallel group that share a node; 1 for groups within a node."""
    if not options.tp_crosses.any():
        return np.ones(len(options))
    node = max(Counter(d.node for d in cluster.devices).values())
    return np.where(options.tp_crosses, np.minimum(options.tp, node), 1.0)


def price(passes: Passes, cluster: Cluster, curves: Curves) -> FloatArray:
    """Ideal seconds by option and class: [num_options, num_classes]."""
    p, device, work = passes, cluster.device_spec, Work(len(passes.tokens))
    flops_per_s, bytes_per_s = device.peak_flops_per_s, device.memory_bytes_per_s
    rounds = p.layer_passes * p.rounds
    saturation = curves.saturation(p.tokens, p.width)
    gemm = np.maximum(p.flops / flops_per_s, p.weight_bytes / bytes_per_s)
    work.add(OpClass.GEMM, rounds * gemm * saturation)
    work.add(OpClass.ATTENTION_PREFILL, rounds * p.attention_flops / flops_per_s)
    # Only the last rank has a head: it fills and drains while the others do.
    heads = p.head_passes * p.micro_batches
    work.add(OpClass.HEAD, heads * p.head_flops / flops_per_s * saturation)
    moved = rounds * p.moved_bytes + heads * p.head_bytes
    work.add(OpClass.MEMORY_BOUND, moved / bytes_per_s)
    inverse = curves.inverse
    busy_s = work.table[:, _COMPUTE] @ inverse[list(_COMPUTE)]
    launching = rounds * p.kernels * device.launch_s
    started = exposed(launching * inverse[INDEX[OpClass.LAUNCH]], busy_s, curves.hiding)
    work.add(OpClass.LAUNCH, started / inverse[INDEX[OpClass.LAUNCH]])
    add_all_reduce(
        work, cluster, p.tp_crosses, p.tp, p.boundary_bytes / p.tp_rails, p.sums * p.rounds
    )
    add_p2p(work, cluster, p.pp_crosses, p.boundary_bytes, p.messages * p.rounds)

    # Gradients are summed over units while the last micro-batch's backward pass still computes.
    summing = Work(len(p.tokens))
    ways = np.where(p.dp_crosses, p.dp_rails, 1.0) * curves.gradient_rate
    gathers = (p.gathered_bytes > 0).astype(np.float64)
    add_all_reduce(summing, cluster, p.dp_crosses, p.dp, p.gradient_bytes / ways, 1.0 - gathers)
    for size in (p.gradient_bytes, p.gathered_bytes):  # reduce-scatter, all-gather
        add_all_gather(summing, cluster, p.dp_crosses, p.dp, size / ways, gathers)
    sum_s = summing.table @ inverse
    backward_s = busy_s / p.micro_batches * _BACKWARD / p.layer_passes
    part = exposed(sum_s, backward_s, curves.overlap) / np.maximum(sum_s, 1e-30)
    work.table += summing.table * part[:, None]
    work.add(OpClass.MEMORY_BOUND, p.touched_bytes / bytes_per_s)
    return work.table
