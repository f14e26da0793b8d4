"""Training that is made up but honest: losses depend on state, and on no layout.

Every element of every logical tensor is initialised, gets its gradient and is updated by arithmetic
on its own value, its index and the samples of the step, so each shard computes its own part. The
sample sum is one of integers, exact in any order; element sums use `math.fsum`, exact in any order
too. Two layouts therefore give bit-identical state and losses, and any slip in carrying state or
batches shows in them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.sim.world import Store
from nereus_core.state import Box, Slot, tensor_rules, unit_shards

Numbers = NDArray[np.float64]

LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-2, 0.9, 0.999, 1e-8
"""Adam's usual betas and epsilon (Kingma and Ba 2015); the rate is chosen, not measured."""
PULL = 0.05
"""Weight of an element's own value in its gradient; chosen so that state feeds back."""


def mixed(*values: int) -> int:
    """Hash integers into [-2^20, 2^20); the same everywhere and for ever."""
    return (zlib.crc32(repr(values).encode()) & 0x1FFFFF) - (1 << 20)


@lru_cache(maxsize=4096)
def _coefficients(name: str, shape: tuple[int, ...], box: Box) -> Numbers:
    """Return a fixed number in [-1, 1) for each element of a box, by its index in the tensor."""
    index = np.zeros(box.shape, dtype=np.int64)
    for dim, (offset, count, length) in enumerate(zip(box.offset, box.shape, shape, strict=True)):
        along = np.arange(offset, offset + count).reshape(
            [-1 if d == dim else 1 for d in range(len(shape))]
        )
        index = index * length + along
    # A multiplicative hash (Knuth, TAOCP 3, 6.4: the golden ratio of 2^32).
    hashed = (index * 2654435761 + zlib.crc32(name.encode())) & 0xFFFFF
    return (hashed / (1 << 19) - 1.0).astype(np.float64)


@lru_cache(maxsize=64)
def _shapes(model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    return {rule.name: rule.shape for rule in tensor_rules(model)}


@lru_cache(maxsize=256)
def counted(model: ModelSpec, layout: Layout) -> tuple[tuple[int, str], ...]:
    """List (local rank, tensor) such that every element of the model is listed exactly once."""
    seen: set[tuple[str, Box]] = set()
    found = []
    for rank, shard in enumerate(unit_shards(model, layout)):
        for name, box in shard.items():
            if (name, box) not in seen:
                seen.add((name, box))
                found.append((rank, name))
    return tuple(found)


def initialise(store: Store, model: ModelSpec, seed: int) -> None:
    """Fill fresh storage: parameters from the seed, moments zero."""
    shapes = _shapes(model)
    scale = 0.02 * (1 + mixed(seed) / (1 << 21))
    for (slot, name), array in store.arrays.items():
        if slot is Slot.PARAM:
            array[...] = scale * _coefficients(name, shapes[name], store.shard[name])
        else:
            array[...] = 0.0


def sample_sum(seed: int, step: int, sample_ids: Iterable[int]) -> int:
    """Sum the samples' integers: what data-parallel units add up."""
    return sum(mixed(seed, step, sample) for sample in sample_ids)


def gradients(store: Store, model: ModelSpec, total: int, batch: int) -> dict[str, Numbers]:
    """Return the gradient of every tensor a shard holds.

    Args:
        store: the shard.
        model: shapes of the whole model.
        total: `sample_sum` over the global batch.
        batch: samples in the global batch.
    """
    shapes = _shapes(model)
    mean = total / (batch * (1 << 20))
    return {
        name: mean * _coefficients(name, shapes[name], box)
        + PULL * store.arrays[Slot.PARAM, name].astype(np.float64)
        for name, box in store.shard.items()
    }


def update(store: Store, grads: Mapping[str, Numbers], step: int) -> None:
    """Apply Adam to a shard in place.

    Args:
        store: the shard.
        grads: as `gradients` returned them.
        step: number of this update, from 1 (bias correction, so losing the counter shows).
    """
    for name, grad in grads.items():
        param, m, v = (store.arrays[s, name] for s in (Slot.PARAM, Slot.EXP_AVG, Slot.EXP_AVG_SQ))
        m[...] = BETA1 * m + (1 - BETA1) * grad
        v[...] = BETA2 * v + (1 - BETA2) * grad * grad
        m_hat, v_hat = m / (1 - BETA1**step), v / (1 - BETA2**step)
        param[...] = param - LEARNING_RATE * m_hat / (np.sqrt(v_hat) + EPSILON)


def loss(
    stores: Sequence[Store], model: ModelSpec, layout: Layout, total: int, batch: int
) -> float:
    """Return a loss of one unit: a sum over logical elements, each counted once, and the samples.

    ``stores`` are in order of local rank.
    """
    shapes = _shapes(model)
    parts = (
        stores[rank].arrays[Slot.PARAM, name]
        * _coefficients(name, shapes[name], stores[rank].shard[name])
        for rank, name in counted(model, layout)
    )
    return _exact_sum(parts) + total / (batch * (1 << 20))


def grad_norm(grads: Sequence[Mapping[str, Numbers]], model: ModelSpec, layout: Layout) -> float:
    """Return the global norm of a unit's gradients, each logical element counted once."""
    return math.sqrt(_exact_sum(grads[rank][name] ** 2 for rank, name in counted(model, layout)))


def _exact_sum(parts: Iterable[NDArray[Any]]) -> float:
    return math.fsum(x for part in parts for x in part.ravel().tolist())
