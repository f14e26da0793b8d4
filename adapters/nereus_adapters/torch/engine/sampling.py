"""Sampling that depends on a sequence's seed and position only, not on layout or batch.

The Gumbel-max trick with counter-based noise: token v of a sequence at a position wins by the
largest ``logit / temperature + gumbel(seed, position, v)``. Each tensor-parallel rank draws noise
for its own vocabulary rows, and ranks exchange only their winners.
"""

from __future__ import annotations

import torch

from nereus_adapters.torch.engine.group import Group


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    start: int,
    group: Group,
    *,
    temperature: float,
    greedy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row.

    Args:
        logits: [B, rows], this rank's vocabulary rows.
        seeds: int64 [B], one per sequence.
        positions: int64 [B], of the token to be chosen in its sequence.
        start: first vocabulary row of this rank.
        group: ranks that share the vocabulary.
        temperature: of the choice; log-probabilities are those of temperature 1.
        greedy: take the largest logit, the lowest token among equals.

    Returns:
        Tokens int64 [B] and their log-probabilities float64 [B], identical on every rank.
    """
    wide = logits.double()
    scores = wide
    if not greedy:
        rows = torch.arange(start, start + logits.shape[-1], device=logits.device)
        scores = wide / temperature + gumbel(seeds, positions, rows)
    best, row = scores.max(-1)
    peak = wide.amax(-1)
    total = (wide - peak[:, None]).exp().sum(-1)
    chosen = wide.gather(-1, row[:, None])[:, 0]
    # Token ids are exact in float64. One message: [size, 5, B].
    mine = torch.stack([best, (row + start).double(), chosen, peak, total])[None]
    every = group.all_gather_uneven(mine, 0, [1] * group.size)
    winner = every[:, 0].argmax(0)  # the lowest rank among equals

    def won(index: int) -> torch.Tensor:
        return every[:, index].gather(0, winner[None])[0]

    highest = every[:, 3].amax(0)
    log_total = highest + ((every[:, 3] - highest).exp() * every[:, 4]).sum(0).log()
    return won(1).long(), won(2) - log_total


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return float64 [B, rows] standard Gumbel noise, a pure function of its arguments."""
    keys = _mix(_mix(seeds * _GOLDEN) ^ (positions * _ODD))
    bits = _mix(keys[:, None] ^ _mix(rows * _GOLDEN)[None, :])
    # The middle of one of 2^53 equal steps: never 0 or 1.
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# Constants of SplitMix64 (Steele, Lea and Flood 2014) in the two's complement that torch has.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_ODD = _signed(0xD6E8FEB86659FD93)


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right without sign extension."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64; multiplication wraps."""
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)
