"""Bytes a model-stage takes on each of its devices: what stays, and what its running needs.

Every device of a unit is charged like the fullest one. Colocated stages add up what stays; of what
running needs only the largest counts, because stages that share a device never run at once.
"""

from __future__ import annotations

import numpy as np

from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import FloatArray
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.workload import Job, ModelStage, Stage

_LOGITS_BYTES = 4
"""Logits are float32 on every framework studied."""


def persistent_bytes(
    job: Job, stage: ModelStage, options: Options, shapes: RankShapes
) -> FloatArray:
    """Bytes kept between steps: parameters, and moments and master copies where it trains."""
    precision = job.precision
    kept = np.full(len(options), float(precision.kept_bytes(stage.stage)))
    if stage.stage is Stage.TRAIN and job.sharded_optimizer:
        optimizer = precision.train_bytes - precision.param_bytes
        kept = precision.param_bytes + optimizer / options.dp
    return np.asarray(shapes.params * kept)


def transient_bytes(
    job: Job,
    stage: ModelStage,
    options: Options,
    shapes: RankShapes,
    lengths: Lengths,
    waves: FloatArray,
) -> FloatArray:
    """Bytes that exist only while the stage runs: gradients, activations, logits, KV cache."""
    model, each = job.model(stage), job.precision.param_bytes
    sequences = job.global_batch / options.dp
    # Ranks that take sequences of their own (`Job.device_batch`) hold them with the whole model's
    # activations; ranks that share theirs hold a part of each.
    ranks = options.tp if job.device_batch is not None else np.ones(len(options))
    if stage.stage is Stage.GENERATE:
        alive = np.ceil(sequences / waves)
        # A cache is paged, so that all at once hold no more than the 95th percentile each.
        longest = lengths.longest_of(alive, job.global_batch)
        tokens = lengths.prompt_mean + np.minimum(longest, lengths.response_p95)
        cache = 2 * shapes.kv * shapes.layers * each * tokens * alive
        return np.asarray(cache + 2 * _LOGITS_BYTES * shapes.vocab * alive)
    tokens = _micro_batch_tokens(job, stage, options, sequences / ranks, lengths)
    # Logits and their softmax; a value head has one output.
    logits = 2 * _LOGITS_BYTES * (shapes.vocab * ranks if model.head == "lm" else 1.0) * tokens
    # Kept for backward per token and layer: block inputs, normed inputs (twice), q, k, v, attention
    # output; gate, up, activation, product (Korthikanti et al. 2022 without dropout and scores).
    # With sequence parallelism each rank keeps its part of what all ranks hold otherwise.
    parts = options.tp / ranks if job.sequence_parallel else np.ones(len(options))
    whole = model.hidden / parts
    kept = 4 * whole + ranks * (2 * shapes.query + 2 * shapes.kv + 4 * shapes.intermediate)
    if stage.stage is Stage.INFER:
        return np.asarray(logits + kept * each * tokens)
    # One-forward-one-backward: the first pipeline rank holds pp micro-batches at once, the last one
    # and its logits.
    in_flight = np.minimum(options.pp, np.ceil(sequences / job.micro_batch))
    gradients = shapes.params * job.precision.grad_bytes
    if job.recompute == "full":
        first = (whole * shapes.layers * in_flight + kept) * each * tokens
        last = (whole * shapes.layers + kept) * each * tokens
    else:
        first = kept * each * tokens * shapes.layers * in_flight
        last = kept * each * tokens * shapes.layers
    return np.asarray(gradients + np.maximum(first, last + 1.5 * logits))


def _micro_batch_tokens(
    job: Job, stage: ModelStage, options: Options, each: FloatArray, lengths: Lengths
) -> FloatArray:
    """Tokens that a rank holds at once, as if none of their activations were shared.

    Args:
        job: The job.
        stage: One that trains or infers.
        options: Ways to lay it out.
        each: Sequences of a rank, were none of them shared; those of a unit where it shares them.
        lengths: Of sequences.
    """
    # Under `Job.device_batch` some ranks may share each sequence: together they hold a micro-batch
    # of their common sequences, and each of them its part of it.
    by_device = job.device_batch is not None
    together = float(job.sequence_ranks.get(stage, 1)) if by_device else 1.0
    sequences = np.ceil(each * together)
    budget = job.micro_tokens.get(stage)
    if budget is None:
        tokens = np.minimum(job.micro_batch, sequences) * lengths.total_max
    else:  # filled with sequences as long as they are, one at least
        ranks = options.tp if job.sequence_parallel else together
        tokens = np.minimum(
            np.maximum(budget.most * ranks, lengths.total_max), sequences * lengths.total_mean
        )
        tokens = np.maximum(tokens, lengths.total_max)
    return np.asarray(tokens / together)


def wave_ladder(job: Job, stage: ModelStage) -> tuple[int, ...]:
    """Rounds to consider in which a generating unit takes its sequences, fewest first.

    Powers of two up to one sequence at a time; 1 for every other stage.
    """
    if stage.stage is not Stage.GENERATE:
        return (1,)
    return tuple(1 << i for i in range((job.global_batch - 1).bit_length() + 1))
