"""Lengths: the token counts that a prediction is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from nereus_core.observation import Observation
from nereus_core.workload import Job


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens per sequence; the tail of responses decides when a generated batch ends."""

    prompt_mean: float
    response_mean: float
    response_p95: float
    response_max: float

    @classmethod
    def of(cls, seen: Observation) -> Self:
        """Take the counts of the last step."""
        prompt, response = seen.prompt_tokens, seen.response_tokens
        return cls(prompt.mean, response.mean, response.p95, float(response.max))

    @classmethod
    def of_job(cls, job: Job) -> Self:
        """Before the first step: full prompts, responses at half of what may be.

        Half is chosen, not measured; the tail is what is allowed, which is safe for memory.
        """
        limit = float(job.max_response_tokens)
        return cls(float(job.max_prompt_tokens), limit / 2, limit, limit)

    @property
    def total_mean(self) -> float:
        """Mean tokens of a whole sequence."""
        return self.prompt_mean + self.response_mean
