"""How far log-probabilities in float32 are apart, in units in their last place."""

import torch

SMALLEST = 4.0
"""Whose unit is the least that counts: one is a logit less the logarithm of a sum over 512 words,
which is about 6, so it is no more exact for being small."""
MOST = 3.0
"""That a rollout's and an actor's may be apart, who add up in another order. Seen: 2.0."""
BITS = 23
"""Of a float32's fraction."""


def ulps(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the distance of each pair; NaN where either is."""
    mine, theirs = mine.double(), theirs.double()
    scale = torch.maximum(mine.abs(), theirs.abs()).clamp(min=SMALLEST)
    return (mine - theirs).abs() / torch.exp2(torch.floor(torch.log2(scale)) - BITS)
