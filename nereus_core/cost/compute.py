"""Ideal work of a model-stage per operation class: FLOPs, bytes, messages and launches over peaks.

Each function takes columns of options and returns ideal seconds [num_options, num_classes] of the
busiest device of a unit. Symbols: b sequences per unit, m micro-batches, L layers, h hidden.
"""

from __future__ import annotations

import numpy as np

from nereus_core.cost.collectives import add_all_gather, add_all_reduce, add_p2p
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import FloatArray, OpClass, Work
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.model import ModelSpec
from nereus_core.workload import Job, ModelStage, Stage

_KERNELS_PER_LAYER = 17
"""Counted in transformers' LlamaDecoderLayer: 2 norms, q k v, 2 rotary, 2 cache, attention, o,
gate, up, activation, product, down, 2 residuals, 1 reshape copy."""
_KERNELS_PER_PASS = 6
"""Embedding, masks, final norm, head, softmax, gather: counted likewise."""
_FIXED_S = 2e-3
"""One call to the units of a stage and back; chosen, not measured, learned online."""
_TRAIN_PASSES = 3
"""A backward pass costs two forward passes (Kaplan et al. 2020, section 2.1)."""


def stage_work(
    job: Job,
    stage: ModelStage,
    options: Options,
    shapes: RankShapes,
    lengths: Lengths,
    waves: FloatArray,
) -> FloatArray:
    """Ideal seconds of one RL step of a model-stage, by option and class.

    Args:
        job: shapes, batch and cluster.
        stage: which model-stage.
        options: its layouts and units.
        shapes: what they make of the model.
        lengths: tokens per sequence.
        waves: in how many rounds a generating unit takes its sequences; others ignore it.
    """
    work = Work(len(options))
    if stage.stage is Stage.GENERATE:
        _generate(work, job, job.model(stage), options, shapes, lengths, waves)
    else:
        _forward(work, job, stage, options, shapes, lengths)
        if stage.stage is Stage.TRAIN:
            _update(work, job, options, shapes)
    passes = job.workload.node(stage).passes
    work.table *= passes
    work.add(OpClass.FIXED, _FIXED_S * passes)
    return work.table


def _forward(
    work: Work,
    job: Job,
    stage: ModelStage,
    options: Options,
    shapes: RankShapes,
    lengths: Lengths,
) -> None:
    """Micro-batched passes over whole sequences: forward only, or forward and backward."""
    model, device = job.model(stage), job.cluster.device_spec
    each = job.precision.param_bytes
    times = _TRAIN_PASSES if stage.stage is Stage.TRAIN else 1
    sequences = job.global_batch / options.dp
    micro_batches = np.ceil(sequences / job.micro_batch)
    tokens = sequences * lengths.total_mean / micro_batches
    # A pipeline fills and drains: m micro-batches take the time of m + pp - 1 on one rank.
    rounds = times * (micro_batches + options.pp - 1)

    flops = 2 * shapes.matrix * shapes.layers * tokens
    weights = shapes.matrix * shapes.layers * each
    gemm = np.maximum(flops / device.peak_flops_per_s, weights / device.memory_bytes_per_s)
    work.add(OpClass.GEMM, rounds * gemm)
    # Causal attention: scores and their use, 2 * 2 * (H/tp) * d * T^2 / 2 FLOPs per sequence.
    attention = 2 * shapes.query * lengths.total_square * shapes.layers * sequences / micro_batches
    work.add(OpClass.ATTENTION_PREFILL, rounds * attention / device.peak_flops_per_s)
    if model.head == "lm":
        head = 2 * model.hidden * shapes.vocab * tokens
        work.add(OpClass.HEAD, rounds * head / device.peak_flops_per_s)
        # Logits in float32: written, read for the maximum, the sum and the pick.
        work.add(
            OpClass.MEMORY_BOUND, rounds * 16 * shapes.vocab * tokens / device.memory_bytes_per_s
        )
    work.add(
        OpClass.MEMORY_BOUND,
        rounds * _elementwise(model, shapes) * each * tokens * shapes.layers
        / device.memory_bytes_per_s,
    )  # fmt: skip
    _add_launches(work, job, rounds * (_KERNELS_PER_LAYER * shapes.layers + _KERNELS_PER_PASS))

    boundary = tokens * model.hidden * each
    ranks = options.tp.astype(np.float64)
    # Two all-reduces per layer and pass (attention and MLP outputs), and one for the embeddings;
    # a backward pass has as many as a forward pass.
    per_pass = (2 * shapes.layers + 1) * (micro_batches + options.pp - 1)
    add_all_reduce(work, job.cluster, options.tp_crosses, ranks, boundary, per_pass * min(times, 2))
    messages = (options.pp > 1) * (micro_batches + options.pp - 1) * min(times, 2)
    add_p2p(work, job.cluster, options.pp_crosses, boundary, messages)


def _update(work: Work, job: Job, options: Options, shapes: RankShapes) -> None:
    """Sum gradients over units, then step the optimizer."""
    precision, device = job.precision, job.cluster.device_spec
    gradients = shapes.params * precision.grad_bytes
    add_all_reduce(
        work, job.cluster, options.dp_crosses, options.dp.astype(np.float64), gradients, 1.0
    )
    # Parameters, both moments and the master copy are read and written, gradients read.
    touched = shapes.params * (2 * precision.train_bytes + precision.grad_bytes)
    work.add(OpClass.MEMORY_BOUND, touched / device.memory_bytes_per_s)


def _generate(
    work: Work,
    job: Job,
    model: ModelSpec,
    options: Options,
    shapes: RankShapes,
    lengths: Lengths,
    waves: FloatArray,
) -> None:
    """Prefill, then token by token until the longest response of each wave ends.

    A step of decoding passes through the pipeline ranks one after another, so pp divides neither
    its reading of weights nor its work: it only makes a model fit.
    """
    device, each = job.cluster.device_spec, job.precision.param_bytes
    flops_per_s, bytes_per_s = device.peak_flops_per_s, device.memory_bytes_per_s
    sequences = job.global_batch / options.dp
    waves = np.minimum(waves, sequences)
    alive = sequences / waves
    # The slowest unit has the batch's longest response in one of its waves.
    steps = (waves - 1) * lengths.longest_of(alive, job.global_batch) + lengths.response_max
    layers = model.num_layers
    matrix = shapes.matrix * layers

    prefill = np.maximum(
        2 * matrix * alive * lengths.prompt_mean / flops_per_s, matrix * each / bytes_per_s
    )
    work.add(OpClass.GEMM, waves * prefill)
    attention = 2 * shapes.query * lengths.prompt_mean**2 * layers * sequences
    work.add(OpClass.ATTENTION_PREFILL, attention / flops_per_s)
    # The weights are read once per step; each sequence costs its own products.
    tokens = sequences * lengths.response_mean
    decode = np.maximum(steps * matrix * each / bytes_per_s, 2 * matrix * tokens / flops_per_s)
    work.add(OpClass.GEMM_DECODE, decode)
    # Keys and values of everything before: sum over t of (prompt + t) for each response.
    context = lengths.prompt_mean * lengths.response_mean + lengths.response_square / 2
    read = 2 * shapes.kv * layers * each * context * sequences
    work.add(OpClass.ATTENTION_DECODE, read / bytes_per_s)
    rows = model.hidden * shapes.vocab
    head = np.maximum(steps * rows * each / bytes_per_s, 2 * rows * tokens / flops_per_s)
    work.add(OpClass.HEAD, head)
    # Logits in float32 are written once and read three times to sample.
    sampled = 16 * shapes.vocab * lengths.response_mean
    passed = _elementwise(model, shapes) * each * layers * lengths.total_mean
    work.add(OpClass.MEMORY_BOUND, sequences * (sampled + passed) / bytes_per_s)
    passes = waves + steps
    _add_launches(work, job, passes * (_KERNELS_PER_LAYER * layers + _KERNELS_PER_PASS))

    ranks = options.tp.astype(np.float64)
    row = model.hidden * each
    mean_alive = tokens / steps
    for size, times in ((alive * lengths.prompt_mean, waves), (mean_alive, steps)):
        sums = times * (2 * layers + 1)
        add_all_reduce(work, job.cluster, options.tp_crosses, ranks, size * row, sums)
        hops = times * (options.pp - 1)
        add_p2p(work, job.cluster, options.pp_crosses, size * row, hops)
    logits = 4 * model.vocab * mean_alive
    add_all_gather(work, job.cluster, options.tp_crosses, ranks, logits, steps)


def _elementwise(model: ModelSpec, shapes: RankShapes) -> FloatArray:
    """Elements that cross memory per token and layer between matrix products.

    Two norms (read, write) and two residuals (two reads, a write) over h; rotary over q and k;
    activation and product over the intermediate size (three each way).
    """
    wide = (2 * 2 + 2 * 3) * model.hidden * (1.0 if model.norm_style == "pre" else 1.4)
    return np.asarray(wide + 2 * (shapes.query + shapes.kv) + 5 * shapes.intermediate)


def _add_launches(work: Work, job: Job, kernels: FloatArray) -> None:
    """Add the launches that kernels do not hide: launching runs ahead of the device."""
    launching = kernels * job.cluster.device_spec.launch_s
    work.add(OpClass.LAUNCH, np.maximum(0.0, launching - work.table.sum(axis=1)))


def sync_work(job: Job, stage: ModelStage, options: Options, shapes: RankShapes) -> FloatArray:
    """Ideal seconds in which a follower takes up its train stage's weights.

    An upper bound that depends on the follower alone: every device receives its whole shard over
    the slowest link there is. State routes move less where a device already holds a part.
    """
    work = Work(len(options))
    if job.workload.node(stage).weights_from is not None:
        devices = job.cluster.healthy
        crosses = np.full(len(options), any(d.node != devices[0].node for d in devices))
        size_bytes = shapes.params * job.precision.param_bytes
        add_p2p(work, job.cluster, crosses, size_bytes, 1.0)
    return work.table
