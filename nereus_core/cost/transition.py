"""What it takes to change units: bytes a device needs and does not hold, and their seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from nereus_core.cluster import Device
from nereus_core.cost.op_classes import FloatArray, OpClass, Work
from nereus_core.layout import Layout, layer_ranges
from nereus_core.model import ModelSpec
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import (
    Destroy,
    Extend,
    Merge,
    Primitive,
    Split,
    created,
    model_stage_of,
    sources,
)
from nereus_core.state import Box, tensor_rules
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage, Stage

_MESSAGES_PER_LAYER = 9
"""Matrices and norms of a decoder layer, one message each."""
_PRIMITIVE_S = 20e-3
"""Groups made, a call to every seat and back; chosen, not measured, learned online."""

Held = Mapping[Device, tuple[tuple[Layout, int], ...]]
"""Per device, the layouts and local ranks of the shards of one model that it holds."""


@lru_cache(maxsize=4096)
def _common(model: ModelSpec, one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int, int]:
    """Elements two tensor-parallel ranks ``(tp, rank)`` share: per layer, first end, last end."""
    layer = first = last = 0
    for rule in tensor_rules(model):
        if rule.layer not in (None, 0):
            continue
        a, b = rule.box(*one), rule.box(*other)
        shared = _overlap(a, b)
        layer += shared * (rule.layer == 0)
        first += shared * rule.first
        last += shared * (rule.last and not rule.first)
    return layer, first, last


def _overlap(one: Box, other: Box) -> int:
    return prod(
        max(0, min(p + m, q + n) - max(p, q))
        for p, m, q, n in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )


@lru_cache(maxsize=65536)
def shared_elements(model: ModelSpec, one: tuple[Layout, int], other: tuple[Layout, int]) -> int:
    """Elements that two shards ``(layout, local rank)`` have in common; a shard with itself: all.

    Equal to intersecting `state.unit_shards` box by box, without building them: layers are alike.
    """
    (a, rank_a), (b, rank_b) = one, other
    pp_a, pp_b = rank_a // a.tp, rank_b // b.tp
    run_a = layer_ranges(model.num_layers, a.pp)[pp_a]
    run_b = layer_ranges(model.num_layers, b.pp)[pp_b]
    layers = max(0, min(run_a.stop, run_b.stop) - max(run_a.start, run_b.start))
    per_layer, first, last = _common(model, (a.tp, rank_a % a.tp), (b.tp, rank_b % b.tp))
    ends_first = pp_a == 0 and pp_b == 0
    ends_last = pp_a == a.pp - 1 and pp_b == b.pp - 1
    tied = model.tied_embeddings and model.head == "lm"
    # Tied embeddings lie on both ends: either end of one shard meets either end of the other.
    on_a = pp_a == 0 or (tied and pp_a == a.pp - 1)
    on_b = pp_b == 0 or (tied and pp_b == b.pp - 1)
    embeddings = first * (on_a and on_b if tied else ends_first)
    return layers * per_layer + embeddings + last * ends_last


@dataclass(frozen=True, slots=True)
class Movement:
    """Elements that a change moves."""

    received: Mapping[Device, int]
    """Needed and not held, per device that needs any."""
    kept: Mapping[Device, int]
    """Needed and held already."""
    senders: int
    """Devices that hold state to send."""

    @property
    def total(self) -> int:
        """Elements that cross between devices."""
        return sum(self.received.values())


def movement(
    model: ModelSpec, before: Held, after: Iterable[tuple[Device, tuple[Layout, int]]]
) -> Movement:
    """Count what devices need and do not hold.

    A device that holds several shards (of a stage and of the train stage it follows) counts the
    best one only, so this is an upper bound of what `state.routes` moves; equal to it otherwise.
    """
    received: Counter[Device] = Counter()
    kept: Counter[Device] = Counter()
    for device, shard in after:
        own = max((shared_elements(model, h, shard) for h in before.get(device, ())), default=0)
        kept[device] += own
        received[device] += shared_elements(model, shard, shard) - own
    return Movement(received, kept, len(before))


def _held(
    units: Iterable[tuple[Layout, tuple[Device, ...]]],
) -> dict[Device, tuple[tuple[Layout, int], ...]]:
    found: dict[Device, tuple[tuple[Layout, int], ...]] = {}
    for layout, devices in units:
        for rank, device in enumerate(devices):
            found[device] = (*found.get(device, ()), (layout, rank))
    return found


def bytes_to_move(job: Job, before: Placement, after: Placement, stage: ModelStage) -> int:
    """Bytes that one stage's change sends between devices; nothing comes from a failed one."""
    if before == after:
        return 0
    healthy = set(job.cluster.healthy)
    held = _held((before.layout, u) for u in before.units)
    alive = {d: shards for d, shards in held.items() if d in healthy}
    wanted = ((d, (after.layout, r)) for u in after.units for r, d in enumerate(u))
    return movement(job.model(stage), alive, wanted).total * job.precision.kept_bytes(stage.stage)


def plan_bytes_to_move(job: Job, before: Plan, after: Plan) -> int:
    """Bytes that a whole change of plan sends between devices."""
    return sum(bytes_to_move(job, before[s], after[s], s) for s in after if s in before)


def primitive_work(
    job: Job, op: Primitive, units: UnitMap, parked: Container[UnitId] = ()
) -> FloatArray:
    """Ideal seconds of a primitive per class [num_classes].

    The slower of receiving (the device that lacks most) and sending (what is moved, spread over the
    devices that hold it), plus a local copy of what is kept. What is parked, comes from a parked
    unit, or is staged crosses between a device and its host as well.

    Args:
        job: model, precision and hardware.
        op: the primitive.
        units: every unit that it names, alive or parked; of a source that is not among them
            nothing is on any device.
        parked: units whose state lies in host memory. An Extend that reads a unit alive as well is
            priced as if all that it reads were on devices.
    """
    work = Work(1)
    work.add(OpClass.FIXED, _PRIMITIVE_S)
    if isinstance(op, Destroy) and not op.park:
        return np.asarray(work.table[0])
    stage = model_stage_of(op)
    model, each = job.model(stage), job.precision.kept_bytes(stage.stage)
    read = [units[u] for u in sources(op) if u in units]
    made: tuple[Unit, ...] = created(op) or tuple(read)
    held = _held((u.layout, u.devices) for u in read)
    wanted = [(d, (u.layout, r)) for u in made for r, d in enumerate(u.devices)]
    change, spec = movement(model, held, wanted), job.cluster.device_spec
    kept_bytes = max(change.kept.values(), default=0) * each
    if isinstance(op, Destroy):
        work.add(OpClass.HOST, kept_bytes / spec.host_bytes_per_s)
        return np.asarray(work.table[0])
    received_bytes = max(change.received.values(), default=0) * each
    if isinstance(op, Extend) and op.sources and all(u in parked for u in op.sources):
        sent_bytes = change.total * each / max(1, change.senders)
        work.add(OpClass.HOST, max(kept_bytes, received_bytes, sent_bytes) / spec.host_bytes_per_s)
    else:
        work.add(OpClass.COPY, 2 * kept_bytes / spec.memory_bytes_per_s)
    if isinstance(op, Split | Merge) and op.staging_bytes is not None:
        staged_bytes = max(0, received_bytes - op.staging_bytes)  # what is kept stays in place
        work.add(OpClass.HOST, 2 * staged_bytes / spec.host_bytes_per_s)
    if change.total:
        nodes = {d.node for d in held} | {d.node for d, _ in wanted}
        link = job.cluster.inter_node if len(nodes) > 1 else job.cluster.intra_node
        busiest = max(received_bytes / each, change.total / max(1, change.senders))
        slots = 3 if stage.stage is Stage.TRAIN else 1
        messages = slots * _MESSAGES_PER_LAYER * model.num_layers
        seconds = busiest * each / link.bytes_per_s + messages * link.latency_s
        work.add(OpClass.P2P_INTER if len(nodes) > 1 else OpClass.P2P_INTRA, seconds)
    return np.asarray(work.table[0])
