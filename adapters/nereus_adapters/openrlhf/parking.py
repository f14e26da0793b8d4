"""Parking: the optimizer state of a rank goes to host memory, and from there into a new layout.

Each rank hands out what it holds and nothing else: its ZeRO interval of the fp32 masters and of
both moments, as objects in Ray's store that outlive it. A rank of the new group takes those that
meet its own intervals. No tensor is ever put together, on no rank and on no disk.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus_adapters.openrlhf.extents import Extent, overlap
from nereus_adapters.openrlhf.ranks import engine_of
from nereus_adapters.openrlhf.zero import (
    SLOTS,
    counters_of,
    fragments,
    put_counters,
    rank_of_slice,
    refresh_weights,
)

CHUNK_BYTES = 64 << 20
"""Of one object in Ray's store, at least; chosen, not measured: far above Ray's cost of an object
(about a millisecond), far below a rank's share of a large model."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a rank holds, without the bytes."""

    extents: tuple[Extent, ...]
    chunk: tuple[int, ...]
    """By extent: the object that it lies in."""
    counters: Mapping[str, Any]
    """Optimizer step, scheduler, engine counters: the same on all ranks of a group."""
    random: Mapping[str, Any]
    """States of the generators of this rank."""
    digests: Mapping[str, int]
    """Sum of this rank's part, by ``slot/parameter``: see `mixed`."""

    @property
    def num_chunks(self) -> int:
        """Objects that the rank hands out."""
        return max(self.chunk, default=-1) + 1

    @property
    def num_bytes(self) -> int:
        """Bytes of its fp32 state."""
        return sum(map(len, self.extents)) * 4 * len(SLOTS)


def manifest(actor: Any) -> Manifest:
    """Say what this rank holds.

    Raises:
        PrimitiveError: the rank is in the middle of an optimizer step.
    """
    engine = engine_of(actor)
    found, chunks, filled = [], [], 0
    for extent, tensors in fragments(actor, engine):
        del tensors
        found.append(extent)
        chunks.append(filled // CHUNK_BYTES)
        filled += len(extent) * 4 * len(SLOTS)
    return Manifest(
        tuple(found), tuple(chunks), counters_of(engine), _random_states(), digests(actor)
    )


def handed_out(actor: Any, told: Manifest) -> Any:
    """Return the objects of `manifest`, each a mapping of parameter to ``[slots, n]`` fp32."""
    chunks: list[dict[str, np.ndarray[Any, Any]]] = [{} for _ in range(told.num_chunks)]
    number = iter(told.chunk)
    for extent, tensors in fragments(actor, engine_of(actor)):
        stacked = np.stack([t.detach().float().cpu().numpy() for t in tensors])
        chunks[next(number)][extent.name] = stacked
    return tuple(chunks) if len(chunks) != 1 else chunks[0]


def taken_in(actor: Any, shares: Sequence[tuple[Manifest, Sequence[Any]]], timeout_s: float) -> int:
    """Fill this rank's part of a new group from what the old ranks handed out.

    Args:
        actor: A rank that has joined the new group.
        shares: Manifest and references to objects, by old rank.
        timeout_s: Longest wait for the objects.

    Returns:
        Bytes of fp32 state that were copied.

    Raises:
        StateDiffers: some element is held by no old rank.
    """
    import ray
    import torch

    from nereus_core.errors import StateDiffers

    engine, copied = engine_of(actor), 0
    by_name: dict[str, list[tuple[Extent, Any]]] = {}
    for told, refs in shares:
        for extent, number in zip(told.extents, told.chunk, strict=True):
            by_name.setdefault(extent.name, []).append((extent, refs[number]))
    for extent, tensors in fragments(actor, engine, fresh=True):
        missing = np.ones(len(extent), dtype=bool)
        for source, ref in by_name.get(extent.name, ()):
            shared = overlap(source, extent)
            if not shared.num_elements or not missing[_elements(shared)].any():
                continue
            (chunk,) = ray.get([ref], timeout=timeout_s)
            held = torch.from_numpy(np.array(chunk[extent.name]))
            for at, to, length in zip(
                shared.source.tolist(), shared.target.tolist(), shared.length.tolist(), strict=True
            ):
                for tensor, values in zip(tensors, held, strict=True):
                    tensor.data[to : to + length].copy_(values[at : at + length])
                missing[to : to + length] = False
            copied += shared.num_elements * 4 * len(SLOTS)
        if missing.any():
            raise StateDiffers(
                f"rank {actor._rank}", extent.name, f"{missing.sum()} elements that nobody held",
                "all of them",
            )  # fmt: skip
    refresh_weights(engine)
    put_counters(engine, shares[0][0].counters)
    _set_random_states(shares[actor._rank % len(shares)][0].random)
    return copied


def _elements(shared: Any) -> np.ndarray[Any, Any]:
    return np.concatenate(
        [np.arange(t, t + n) for t, n in zip(shared.target, shared.length, strict=True)]
    )


def digests(actor: Any) -> dict[str, int]:
    """Sum up this rank's part of every tensor, so that the sum over ranks is the tensor's digest.

    A parameter that every tensor-parallel rank has whole counts on the first of them.
    """
    found: dict[str, int] = {}
    first = rank_of_slice(actor) == 0
    for extent, tensors in fragments(actor, engine_of(actor)):
        if extent.dim is None and not first:
            continue
        starts, lengths = extent.runs()
        for slot, tensor in zip(SLOTS, tensors, strict=True):
            found[f"{slot}/{extent.name}"] = mixed(tensor, starts, lengths)
    return found


def mixed(tensor: Any, starts: Any, lengths: Any) -> int:
    """Sum, modulo 2**64, a hash of every element's place in the whole parameter and its bits.

    The finalizer of SplitMix64 (Steele, Lea, Flood, 2014, "Fast splittable pseudorandom number
    generators") over place and bits: a sum does not depend on who holds which elements.
    """
    import torch

    bits = tensor.detach().contiguous().view(torch.int32).to(torch.int64)
    at = torch.repeat_interleave(
        torch.from_numpy(starts - (np.cumsum(lengths) - lengths)), torch.from_numpy(lengths)
    ).to(bits.device)
    at += torch.arange(len(bits), device=bits.device)
    hashed = (at << 32) ^ (bits & 0xFFFFFFFF)
    hashed = (hashed ^ ((hashed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    hashed = (hashed ^ ((hashed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    hashed = hashed ^ ((hashed >> 31) & 0x1FFFFFFFF)
    return int(hashed.sum()) % 2**64


def summed(parts: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """Add the digests of all ranks up; hexadecimal, by ``slot/parameter``."""
    total: dict[str, int] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = (total.get(key, 0) + value) % 2**64
    return {key: f"{value:016x}" for key, value in sorted(total.items())}


def _random_states() -> dict[str, Any]:
    import torch

    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    import torch

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def chunks_of(refs: Any) -> Iterator[Any]:
    """Return references one by one, whether Ray gave one or a list."""
    yield from refs if isinstance(refs, list) else [refs]
