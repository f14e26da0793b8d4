"""Autoregressive generation over a unit's tensor- and pipeline-parallel ranks.

Prompts are padded on the right and prefilled under plain causality. Each decode step appends one
slot to the cache of every sequence; slots of padding are hidden by a mask, and positions are each
sequence's own. So a response does not depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache

from nereus_adapters.torch.engine.sampling import sample
from nereus_adapters.torch.engine.stage_model import StageModel
from nereus_adapters.torch.engine.types import Generated


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when a sequence ends."""

    max_new_tokens: int
    temperature: float
    eos_id: int | None
    greedy: bool


@torch.no_grad()
def generate(
    model: StageModel, prompts: list[list[int]], seeds: list[int], sampling: Sampling
) -> Generated:
    """Generate one response per prompt; the result is the same on every rank of the unit."""
    device = model.device
    lens = torch.tensor([len(p) for p in prompts], device=device)
    width = int(lens.max())
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    keys = torch.tensor([_as_int64(seed) for seed in seeds], device=device)
    slots = torch.arange(width, device=device)
    visible = slots[None] < lens[:, None]
    key_positions = slots.repeat(len(prompts), 1)
    cache = DynamicCache()

    hidden = _through(model, tokens, slots[None], cache, None, None)
    last = hidden[torch.arange(len(prompts), device=device), lens - 1] if model.is_last else hidden
    found, scores = [], []
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(sampling.max_new_tokens):
        token, score = _choose(model, last, keys, lens + step, sampling)
        found.append(token)
        scores.append(score)
        if sampling.eos_id is not None:
            ended |= token == sampling.eos_id
        if bool(ended.all()) or step + 1 == sampling.max_new_tokens:
            break
        at = (lens + step)[:, None]
        visible = torch.cat([visible, torch.ones_like(at, dtype=torch.bool)], 1)
        key_positions = torch.cat([key_positions, at], 1)
        hidden = _through(model, token[:, None], at, cache, visible, key_positions)
        last = hidden[:, -1]
    return _cut(torch.stack(found, 1), torch.stack(scores, 1), sampling.eos_id)


def _through(
    model: StageModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: DynamicCache,
    visible: torch.Tensor | None,
    key_positions: torch.Tensor | None,
) -> torch.Tensor:
    """Run tokens [B, Q] down the pipeline; returns this stage's activations."""
    pp, entered = model.groups.pp, tokens
    if not model.is_first:
        shape = (*tokens.shape, model.spec.hidden)
        entered = pp.recv(torch.empty(shape, dtype=model.dtype, device=model.device), pp.rank - 1)
    left: torch.Tensor = model(
        entered, positions, cache=cache, visible=visible, key_positions=key_positions
    )
    if not model.is_last:
        pp.send(left, pp.rank + 1)
    return left


def _choose(
    model: StageModel,
    hidden: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    sampling: Sampling,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample on the last stage and tell the others; tokens int64 [B], log-probabilities [B]."""
    pp = model.groups.pp
    # Token ids are exact in float64: one message for both.
    both = torch.empty(2, len(keys), dtype=torch.float64, device=model.device)
    if model.is_last:
        token, score = sample(
            model.logits(hidden),
            keys,
            positions,
            model.vocab_start,
            model.groups.tp,
            temperature=sampling.temperature,
            greedy=sampling.greedy,
        )
        both[0], both[1] = token, score
    pp.broadcast(both, pp.size - 1)
    return both[0].long(), both[1]


def _cut(tokens: torch.Tensor, scores: torch.Tensor, eos_id: int | None) -> Generated:
    """End each row [B, steps] after its first end-of-sequence token."""
    rows, logprobs = tokens.tolist(), scores.tolist()
    ends = [row.index(eos_id) + 1 if eos_id in row else len(row) for row in rows]
    return Generated(
        [row[:end] for row, end in zip(rows, ends, strict=True)],
        [row[:end] for row, end in zip(logprobs, ends, strict=True)],
    )


def _as_int64(seed: int) -> int:
    """Map any integer to the signed 64-bit range."""
    return (seed + 2**63) % 2**64 - 2**63
