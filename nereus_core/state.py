"""The state map: which part of which logical tensor a device holds, and which bytes go where.

A *logical tensor* is a parameter of the whole model under its Hugging Face name. Fused or padded
storage is an adapter's matter: it gives views of its storage under these names. A *box* is a
rectangular part of a logical tensor. A unit's layout fixes one box per (local rank, tensor), the
same for the parameter and for both Adam moments. `routes` intersects boxes: every byte a device
needs and does not hold is sent to it exactly once, so what is moved equals the lower bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod
from types import MappingProxyType

from nereus_core.cluster import Device
from nereus_core.layout import Layout, check_layout, layer_ranges
from nereus_core.model import ModelSpec
from nereus_core.workload import Precision, Stage


class Slot(StrEnum):
    """The tensors a train stage keeps for each parameter."""

    PARAM = "param"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


TRAIN_SLOTS = (Slot.PARAM, Slot.EXP_AVG, Slot.EXP_AVG_SQ)
FORWARD_SLOTS = (Slot.PARAM,)


def slots_of(stage: Stage) -> tuple[Slot, ...]:
    """Return the slots a stage keeps: parameters, and moments where it trains."""
    return TRAIN_SLOTS if stage is Stage.TRAIN else FORWARD_SLOTS


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular part of a tensor: offset and shape, one entry per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[type[Box], tuple[tuple[int, ...], tuple[int, ...]]]:
        """Pickle as a call: a third of a dataclass's time, and transfers send hundreds."""
        return Box, (self.offset, self.shape)

    @property
    def num_elements(self) -> int:
        """How many elements the box covers."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None.

        >>> Box((0, 0), (4, 4)).intersect(Box((2, 0), (4, 2)))
        Box(offset=(2, 0), shape=(2, 2))
        """
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))

    @property
    def end(self) -> tuple[int, ...]:
        """First index past the box in each dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def minus(self, cut: Box) -> tuple[Box, ...]:
        """Return disjoint boxes that cover this one without ``cut`` (which lies inside it)."""
        rest, offset, shape = [], list(self.offset), list(self.shape)
        for dim in range(len(shape)):
            below = cut.offset[dim] - offset[dim]
            above = offset[dim] + shape[dim] - cut.end[dim]
            if below > 0:
                rest.append(Box(tuple(offset), (*shape[:dim], below, *shape[dim + 1 :])))
            if above > 0:
                start = (*offset[:dim], cut.end[dim], *offset[dim + 1 :])
                rest.append(Box(start, (*shape[:dim], above, *shape[dim + 1 :])))
            offset[dim], shape[dim] = cut.offset[dim], cut.shape[dim]
        return tuple(rest)

    def within(self, owner: Box) -> tuple[slice, ...]:
        """Return the slices of this box in the local storage of ``owner``, which contains it."""
        return tuple(
            slice(o - p, o - p + n)
            for o, p, n in zip(self.offset, owner.offset, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A logical tensor and how layouts cut it."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    """Dimension cut by tensor parallelism; None is replicated."""
    parts: int
    """Equal parts that ``tp_dim`` consists of and that are never cut (heads; 1 row otherwise)."""
    layer: int | None
    """Decoder layer it belongs to; None for the ends of the model."""
    first: bool = False
    """Held by the first pipeline rank (embeddings)."""
    last: bool = False
    """Held by the last pipeline rank (final norm, head; tied embeddings are on both ends)."""

    def box(self, tp: int, tp_rank: int) -> Box:
        """Return the part a tensor-parallel rank holds.

        With fewer parts than ranks (kv heads under a larger tp) neighbours hold the same part;
        with an indivisible number (a vocabulary) the last rank's part is shorter.
        """
        offset, shape = [0] * len(self.shape), list(self.shape)
        if self.tp_dim is not None:
            width = self.shape[self.tp_dim] // self.parts
            if self.parts < tp:
                start, count = tp_rank * self.parts // tp, 1
            else:
                per_rank = -(-self.parts // tp)
                start = tp_rank * per_rank
                count = min(per_rank, self.parts - start)
            offset[self.tp_dim], shape[self.tp_dim] = start * width, count * width
        return Box(tuple(offset), tuple(shape))


@lru_cache(maxsize=64)
def tensor_rules(model: ModelSpec) -> tuple[TensorRule, ...]:
    """List every logical tensor of a model, in Hugging Face's names and order of layers.

    Source: transformers 5.x modeling_{llama,mistral,qwen2,qwen3,gemma,gemma2,gemma3}.
    """
    h, d, v = model.hidden, model.head_dim, model.vocab
    q, kv = model.num_heads * d, model.num_kv_heads * d
    tied = model.tied_embeddings and model.head == "lm"
    rules = [
        TensorRule("model.embed_tokens.weight", (v, h), 0, v, None, first=True, last=tied),
    ]
    for i in range(model.num_layers):
        at = f"model.layers.{i}."
        for name, rows, parts in (
            ("q_proj", q, model.num_heads),
            ("k_proj", kv, model.num_kv_heads),
            ("v_proj", kv, model.num_kv_heads),
        ):
            rules.append(TensorRule(f"{at}self_attn.{name}.weight", (rows, h), 0, parts, i))
            if model.qkv_bias:
                rules.append(TensorRule(f"{at}self_attn.{name}.bias", (rows,), 0, parts, i))
        rules.append(TensorRule(f"{at}self_attn.o_proj.weight", (h, q), 1, model.num_heads, i))
        if model.qk_norm:
            rules += [
                TensorRule(f"{at}self_attn.{n}_norm.weight", (d,), None, 1, i) for n in ("q", "k")
            ]
        m = model.intermediate
        rules += [
            TensorRule(f"{at}mlp.gate_proj.weight", (m, h), 0, m, i),
            TensorRule(f"{at}mlp.up_proj.weight", (m, h), 0, m, i),
            TensorRule(f"{at}mlp.down_proj.weight", (h, m), 1, m, i),
        ]
        norms = ["input_layernorm", "post_attention_layernorm"]
        if model.norm_style == "sandwich":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        rules += [TensorRule(f"{at}{n}.weight", (h,), None, 1, i) for n in norms]
    rules.append(TensorRule("model.norm.weight", (h,), None, 1, None, last=True))
    if model.head == "value":
        rules.append(TensorRule("score.weight", (1, h), None, 1, None, last=True))
    elif not tied:
        rules.append(TensorRule("lm_head.weight", (v, h), 0, v, None, last=True))
    return tuple(rules)


Shard = Mapping[str, Box]
"""What one device holds of one model: logical tensor name -> box."""


@lru_cache(maxsize=256)
def unit_shards(model: ModelSpec, layout: Layout) -> tuple[Shard, ...]:
    """Return the shard of every local rank of a unit (local rank = pp_rank * tp + tp_rank).

    Raises:
        LayoutError: the model's shapes do not allow the layout.
    """
    check_layout(model, layout)
    runs = layer_ranges(model.num_layers, layout.pp)
    shards = []
    for pp_rank in range(layout.pp):
        held = [
            rule
            for rule in tensor_rules(model)
            if (rule.layer is not None and rule.layer in runs[pp_rank])
            or (rule.first and pp_rank == 0)
            or (rule.last and pp_rank == layout.pp - 1)
        ]
        for tp_rank in range(layout.tp):
            boxes = {rule.name: rule.box(layout.tp, tp_rank) for rule in held}
            shards.append(MappingProxyType(boxes))
    return tuple(shards)


def placed(
    model: ModelSpec, layout: Layout, devices: tuple[Device, ...]
) -> tuple[tuple[Device, Shard], ...]:
    """Pair each device of a unit with its shard."""
    return tuple(zip(devices, unit_shards(model, layout), strict=True))


def shard_bytes(shard: Shard, precision: Precision, stage: Stage) -> int:
    """Bytes a device keeps for a shard between steps (gradients not counted)."""
    return precision.kept_bytes(stage) * sum(box.num_elements for box in shard.values())


@dataclass(frozen=True, slots=True)
class Route:
    """One box of one logical tensor on its way; source == target is a copy that never leaves."""

    tensor: str
    box: Box
    source: Device
    target: Device

    @property
    def is_local(self) -> bool:
        """Whether the bytes stay on their device."""
        return self.source == self.target


def routes(
    before: Iterable[tuple[Device, Shard]], after: Iterable[tuple[Device, Shard]]
) -> tuple[Route, ...]:
    """Say where every box of ``after`` comes from.

    A device first uses what it holds itself; the rest is fetched exactly once, from a holder on the
    same node if there is one, else from any, always the holder that has sent least so far, so that
    several intact replicas share the sending. Deterministic.

    Raises:
        KeyError: a part of a tensor is held nowhere in ``before``; names tensor and box.

    Cost: O(tensors x devices holding them).
    """
    holders: dict[str, list[tuple[Device, Box]]] = defaultdict(list)
    own: dict[tuple[Device, str], list[Box]] = defaultdict(list)
    for device, shard in before:
        for name, box in shard.items():
            if box not in own[device, name]:
                holders[name].append((device, box))
                own[device, name].append(box)
    sent: dict[Device, int] = defaultdict(int)
    found: list[Route] = []
    for target, shard in after:
        for name, wanted in shard.items():
            missing = [wanted]
            for held in own[target, name]:
                missing = list(_take(found, name, held, target, target, missing))
            while missing:
                box = missing.pop()
                source, part = _best_source(holders[name], box, target, sent, name)
                sent[source] += part.num_elements
                found.append(Route(name, part, source, target))
                missing.extend(box.minus(part))
    return tuple(found)


def _take(
    found: list[Route], name: str, held: Box, source: Device, target: Device, missing: list[Box]
) -> Iterator[Box]:
    """Record what of ``missing`` lies in ``held``; yield what is still missing."""
    for box in missing:
        part = box.intersect(held)
        if part is None:
            yield box
        else:
            found.append(Route(name, part, source, target))
            yield from box.minus(part)


def _best_source(
    holders: list[tuple[Device, Box]],
    box: Box,
    target: Device,
    sent: Mapping[Device, int],
    name: str,
) -> tuple[Device, Box]:
    candidates = [
        (device.node != target.node, sent.get(device, 0), device, part)
        for device, held in holders
        if (part := box.intersect(held)) is not None
    ]
    if not candidates:
        raise KeyError(f"no device holds {name} at offset {box.offset} shape {box.shape}")
    _, _, device, part = min(candidates)
    return device, part


def moved_elements(found: Iterable[Route]) -> int:
    """Elements that cross between devices."""
    return sum(r.box.num_elements for r in found if not r.is_local)


def needed_elements(
    before: Iterable[tuple[Device, Shard]], after: Iterable[tuple[Device, Shard]]
) -> int:
    """The lower bound: elements that devices need and do not hold, counted without routes."""
    own: dict[tuple[Device, str], list[Box]] = defaultdict(list)
    for device, shard in before:
        for name, box in shard.items():
            own[device, name].append(box)
    total = 0
    for target, shard in after:
        for name, wanted in shard.items():
            missing = [wanted]
            for held in own[target, name]:
                missing = [rest for box in missing for rest in _outside(box, held)]
            total += sum(box.num_elements for box in missing)
    return total


def _outside(box: Box, held: Box) -> tuple[Box, ...]:
    part = box.intersect(held)
    return (box,) if part is None else box.minus(part)
