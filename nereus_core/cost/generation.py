"""Ideal work of generating responses: prefill, then token by token while the batch shrinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from nereus_core.cost.batching import evicted_tokens, timeline
from nereus_core.cost.collectives import add_all_gather, add_all_reduce, add_p2p
from nereus_core.cost.kernels import kernels_of, layer_gemm_s
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import FloatArray, IntArray, OpClass, Work
from nereus_core.cost.passes import KERNELS_PER_LAYER, KERNELS_PER_PASS, add_launches, elementwise
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.model import ModelSpec
from nereus_core.workload import Job

_CHUNK_TOKENS = 8192
"""Prompt tokens of one prefill pass. Source: vLLM's default max_num_batched_tokens for serving on
H100-class devices (v1 engine)."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """Decode iterations of a unit by part of its timeline. Shapes: [num_parts, num_options]."""

    iterations: FloatArray
    alive: FloatArray
    """Mean sequences that decode at once."""
    context: FloatArray
    """Mean cached tokens of each."""

    @classmethod
    def of(cls, lengths: Lengths, batch: int, slots: FloatArray, units: FloatArray) -> Self:
        """Follow units that share a batch and decode so many sequences at once.

        The unit that ends last counts: it has the longest response in one of its slots.
        """
        rounds = np.round(batch / (slots * units), 6)
        distinct, which = np.unique(rounds, return_inverse=True)
        lines = [timeline(lengths, batch, float(value)) for value in distinct]
        parts = max(len(line.ends) for line in lines)
        # Units that take as many sequences per slot have as many slots in all: one timeline each.
        took, busy, age = (np.zeros((parts, len(lines))) for _ in range(3))
        for i, (value, line) in enumerate(zip(distinct, lines, strict=True)):
            n = len(line.ends)
            until = np.minimum(line.ends, line.last(batch / value))
            took[:n, i] = np.diff(until, prepend=0.0)
            busy[:n, i], age[:n, i] = line.alive, line.age
        alive = np.maximum(busy[:, which] * slots, 1.0)
        return cls(took[:, which], alive, lengths.prompt_mean + age[:, which])


def add_generation(
    work: Work,
    job: Job,
    model: ModelSpec,
    options: Options,
    shapes: RankShapes,
    lengths: Lengths,
    waves: FloatArray,
) -> None:
    """Add the ideal seconds of generating a step's responses on the unit that ends last.

    A step of decoding passes through the pipeline ranks one after another, so pp divides neither
    its reading of weights nor its work: it only makes a model fit.

    Args:
        work: to add to; one row per option.
        job: batch, precision and cluster.
        model: that generates.
        options: its layouts and units.
        shapes: what they make of the model.
        lengths: tokens per sequence.
        waves: sequences that follow one another in a slot, as far as the cache has too few slots.
    """
    distinct, which = _distinct(options, waves)
    own = Work(len(distinct))
    at = options.take(distinct)
    passed = _add_products(own, job, model, at, shapes.take(distinct), lengths, waves[distinct])
    work.table += own.table[which]
    # What pipeline ranks hand on, once for each kind of link between them.
    row = model.hidden * job.precision.param_bytes
    for crosses in (False, True):
        hop = Work(len(distinct))
        for size, times in passed:
            links = np.full(len(distinct), crosses)
            add_p2p(hop, job.cluster, links, size * row, times)
        hops = (options.pp - 1) * (options.pp_crosses == crosses)
        work.table += hop.table[which] * hops[:, None]


def _distinct(options: Options, waves: FloatArray) -> tuple[IntArray, IntArray]:
    """Rows that differ in what products depend on, and for every row which of them it is like.

    Neither pp nor what units or pipeline ranks cross changes a product.
    """
    levels, wave = np.unique(waves, return_inverse=True)
    code = (options.tp * (options.dp.max(initial=0) + 1) + options.dp) * len(levels) + wave
    _, first, which = np.unique(
        2 * code + options.tp_crosses, return_index=True, return_inverse=True
    )
    return first, which


def _add_products(
    work: Work,
    job: Job,
    model: ModelSpec,
    options: Options,
    shapes: RankShapes,
    lengths: Lengths,
    waves: FloatArray,
) -> tuple[tuple[FloatArray, FloatArray], ...]:
    """Add all but what pipeline ranks hand on; returns its tokens per pass, and passes."""
    spec, each = job.cluster.device_spec, job.precision.param_bytes
    kernels, layers, head_dim = kernels_of(spec), model.num_layers, float(model.head_dim)
    sequences = job.global_batch / options.dp
    slots = sequences / np.minimum(waves, sequences)
    ranks, row = options.tp.astype(np.float64), model.hidden * each
    prompt = lengths.prompt_mean

    # Evicted sequences are prefilled again, with what they had generated.
    tokens = sequences * prompt + evicted_tokens(lengths, sequences, slots)
    chunk = np.minimum(np.maximum(slots * prompt, 1.0), _CHUNK_TOKENS)
    chunks = tokens / chunk
    products = layer_gemm_s(kernels.gemm, spec, model, shapes, chunk, each)
    work.add(OpClass.GEMM, chunks * layers * products * kernels.gemm.compute_fraction)
    at_once = chunk / max(prompt, 1.0)
    attention = kernels.prefill.seconds(
        spec, at_once, prompt, shapes.query, shapes.kv, head_dim, each
    )
    work.add(
        OpClass.ATTENTION_PREFILL, chunks * layers * attention * kernels.prefill.compute_fraction
    )

    decoding = Decoding.of(lengths, job.global_batch, slots, options.dp.astype(np.float64))
    iterations, alive, context = decoding.iterations, decoding.alive, decoding.context
    products = layer_gemm_s(kernels.gemm, spec, model, shapes, alive, each)
    decode_s = (iterations * products).sum(axis=0) * layers
    work.add(OpClass.GEMM_DECODE, decode_s * kernels.gemm.bandwidth_fraction)
    attention = kernels.decode.seconds(
        spec, alive, context, shapes.query, shapes.kv, head_dim, each
    )
    attention_s = (iterations * attention).sum(axis=0) * layers
    work.add(OpClass.ATTENTION_DECODE, attention_s * kernels.decode.bandwidth_fraction)
    head = kernels.gemm.seconds(spec, alive, shapes.vocab, float(model.hidden), each)
    head_s = (iterations * head).sum(axis=0)
    work.add(OpClass.HEAD, head_s * kernels.gemm.compute_fraction)
    # Logits in float32 are written once and read three times to sample.
    sampled = 16 * shapes.vocab * lengths.response_mean * sequences
    passed = elementwise(model, shapes) * each * layers
    passed = passed * (tokens + sequences * lengths.response_mean)
    work.add(OpClass.MEMORY_BOUND, (sampled + passed) / spec.memory_bytes_per_s)
    steps = iterations.sum(axis=0)
    add_launches(work, job, (chunks + steps) * (KERNELS_PER_LAYER * layers + KERNELS_PER_PASS))

    passes = ((chunk, chunks), (alive, iterations))
    for size, times in passes:
        sums = times * (2 * layers + 1)
        add_all_reduce(work, job.cluster, options.tp_crosses, ranks, size * row, sums)
    logits = 4 * model.vocab * alive
    add_all_gather(work, job.cluster, options.tp_crosses, ranks, logits, iterations)
    return passes
