"""Ideal work of a model-stage per operation class: FLOPs, bytes, messages and launches over peaks.

Each function takes columns of options and returns ideal seconds [num_options, num_classes] of the
busiest device of a unit. Symbols: b sequences per unit, m micro-batches, L layers, h hidden.
"""

from __future__ import annotations

import numpy as np

from nereus_core.cost.collectives import add_all_gather, add_all_reduce, add_p2p
from nereus_core.cost.curves import Curves
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import FloatArray, OpClass, Work
from nereus_core.cost.passes import KERNELS_PER_LAYER, KERNELS_PER_PASS, add_launches, elementwise
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.cost.training import Passes, price
from nereus_core.model import ModelSpec
from nereus_core.workload import Job, ModelStage, Stage

_FIXED_S = 2e-3
"""One call to the units of a stage and back; chosen, not measured, learned online."""


def stage_work(
    job: Job,
    stage: ModelStage,
    options: Options,
    shapes: RankShapes,
    lengths: Lengths,
    waves: FloatArray,
    curves: Curves,
) -> FloatArray:
    """Ideal seconds of one RL step of a model-stage, by option and class.

    Args:
        job: shapes, batch and cluster.
        stage: which model-stage.
        options: its layouts and units.
        shapes: what they make of the model.
        lengths: tokens per sequence.
        waves: in how many rounds a generating unit takes its sequences; others ignore it.
        curves: how this kind of device falls short of its peaks.
    """
    work = Work(len(options))
    if stage.stage is Stage.GENERATE:
        _generate(work, job, job.model(stage), options, shapes, lengths, waves)
    else:
        passes_of = Passes.of(job, stage, options, shapes, lengths)
        work.table += price(passes_of, job.cluster, curves)
    passes = job.workload.node(stage).passes
    work.table *= passes
    work.add(OpClass.FIXED, _FIXED_S * passes)
    return work.table


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
    passed = elementwise(model, shapes) * each * layers * lengths.total_mean
    work.add(OpClass.MEMORY_BOUND, sequences * (sampled + passed) / bytes_per_s)
    passes = waves + steps
    add_launches(work, job, passes * (KERNELS_PER_LAYER * layers + KERNELS_PER_PASS))

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


def sync_work(job: Job, stage: ModelStage, options: Options, shapes: RankShapes) -> FloatArray:
    """Ideal seconds in which a follower takes up its train stage's weights.

    An upper bound that depends on the follower alone: every device receives its whole shard over
    the slowest link there is. State routes move less where a device already holds a part.
    """
    work = Work(len(options))
    if job.workload.node(stage).weights_from is not None:
        nodes = {d.node for d in job.cluster.healthy}
        crosses = np.full(len(options), len(nodes) > 1)
        size_bytes = shapes.params * job.precision.param_bytes
        add_p2p(work, job.cluster, crosses, size_bytes, 1.0)
    return work.table
