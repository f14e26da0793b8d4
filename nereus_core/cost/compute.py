"""Ideal work of a model-stage per operation class: FLOPs, bytes, messages and launches over peaks.

Each function takes columns of options and returns ideal seconds [num_options, num_classes] of the
busiest device of a unit. Symbols: b sequences per unit, m micro-batches, L layers, h hidden.
"""

from __future__ import annotations

import numpy as np

from nereus_core.cost.collectives import add_p2p
from nereus_core.cost.curves import Curves
from nereus_core.cost.generation import add_generation
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import FloatArray, OpClass, Work
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.cost.training import Passes, price
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
        add_generation(work, job, job.model(stage), options, shapes, lengths, waves)
    else:
        passes_of = Passes.of(job, stage, options, shapes, lengths)
        work.table += price(passes_of, job.cluster, curves)
    passes = job.workload.node(stage).passes
    work.table *= passes
    work.add(OpClass.FIXED, _FIXED_S * passes)
    return work.table


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
