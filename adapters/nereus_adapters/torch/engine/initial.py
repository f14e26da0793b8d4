"""Random weights that depend on seed and name only: every layout gets its boxes of the same."""

from __future__ import annotations

import hashlib

import torch

from nereus_core.state import Box


def initial_tensor(
    name: str, shape: tuple[int, ...], seed: int, std: float, norm: float
) -> torch.Tensor:
    """Return the whole logical tensor in float32: norms ``norm``, biases zero, the rest normal."""
    if name.endswith("norm.weight"):
        return torch.full(shape, norm)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.randn(shape, generator=generator) * std


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of a whole tensor, as a view."""
    return whole[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
