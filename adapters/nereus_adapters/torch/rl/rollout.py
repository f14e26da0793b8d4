"""Rollout: what one RL step has produced so far; it lives on the driver until the step is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from nereus_adapters.torch.engine import Batch, Generated, TrainMetrics


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with the id by which its task scores responses to it."""

    id: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Rollout:
    """One step's samples and what is known of them, in the order of the global batch.

    A step that loses a seat goes on from here: what was sampled is not sampled again.
    """

    step: int
    prompts: tuple[Prompt, ...]
    """One per sequence: a prompt with several responses comes several times in a row."""
    generated: Generated | None = None
    greedy: Generated | None = None
    """Of the same prompts, where the algorithm needs a baseline."""
    batch: Batch | None = None
    """With advantages, once they are known."""
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    metrics: dict[str, TrainMetrics] = field(default_factory=dict)
    """By trained model, of updates that are done."""

    @property
    def sequences(self) -> Batch:
        """Prompts and responses as one batch."""
        assert self.generated is not None
        return Batch.of([p.tokens for p in self.prompts], self.generated.tokens)

    def old_logprobs(self, batch: Batch) -> torch.Tensor:
        """Return float64 [B, T]: of the sampled tokens, under the policy that sampled them."""
        assert self.generated is not None
        found = torch.zeros(batch.tokens.shape, dtype=torch.float64)
        for row, (prompt, values) in enumerate(
            zip(self.prompts, self.generated.logprobs, strict=True)
        ):
            start = len(prompt.tokens)
            found[row, start : start + len(values)] = torch.tensor(values, dtype=torch.float64)
        return found


def joined(parts: Sequence[Generated]) -> Generated:
    """Concatenate the units' responses."""
    return Generated(
        [tokens for part in parts for tokens in part.tokens],
        [values for part in parts for values in part.logprobs],
    )


def stacked(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Concatenate [b, t] parts, each padded on the right with zeros to ``width`` columns."""
    return torch.cat([torch.nn.functional.pad(p.double(), (0, width - p.shape[1])) for p in parts])


def slices(total: int, count: int) -> list[slice]:
    """Cut ``total`` sequences into runs, in order, whose sizes differ by at most one.

    A plan has equal runs; while units are missing after a loss, they need not be.
    """
    short, longer = divmod(total, count)
    starts = [i * short + min(i, longer) for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(starts)]


def sequence_seed(seed: int, step: int, index: int, kind: int) -> int:
    """Return a seed of one sequence: a function of its place in the job, not of any layout.

    SplitMix64's finaliser (Steele, Lea and Flood 2014) over the numbers one after another.
    """
    state = 0
    for number in (seed, step, index, kind):
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**63
