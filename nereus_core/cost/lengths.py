"""Lengths: the token counts of a step, as far as its cost depends on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from nereus_core.cost.op_classes import FloatArray
from nereus_core.errors import CostInputError
from nereus_core.observation import Observation, TokenStats
from nereus_core.workload import Job

_P95_DEVIATIONS = 1.645
"""Standard deviations between mean and 95th percentile of a normal variable."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and response tokens per sequence."""

    prompt_mean: float
    response_mean: float
    response_p95: float
    response_max: float
    response_quantiles: tuple[float, ...] = ()
    """At `QUANTILE_LEVELS`, where known; otherwise a shape is assumed that has the figures above.

    Used only in proportion to their own mean, so that a forecast may move the mean alone."""

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise CostInputError(field.name, value, "a finite number of tokens, zero or more")
        if not self.response_mean <= self.response_p95 <= self.response_max:
            found = f"{self.response_mean:g}, {self.response_p95:g}, {self.response_max:g}"
            raise CostInputError("response mean, p95, max", found, "them in rising order")

    @classmethod
    def of(cls, observation: Observation) -> Self:
        """What was seen in a step."""
        return cls.of_tokens(observation.prompt_tokens, observation.response_tokens)

    @classmethod
    def of_tokens(cls, prompt: TokenStats, response: TokenStats) -> Self:
        """Read two distributions; a count of zero is taken as one token."""
        mean = max(1.0, response.mean)
        p95 = max(mean, response.p95)
        longest = max(p95, float(response.max))
        return cls(max(1.0, prompt.mean), mean, p95, longest, response.quantiles)

    @classmethod
    def of_job(cls, job: Job) -> Self:
        """What to assume before the first step: prompts at their limit, responses at half.

        The tail is at the limit, so memory is planned for the longest response. The half is
        chosen, not measured.
        """
        limit = float(job.max_response_tokens)
        return cls(float(job.max_prompt_tokens), max(1.0, limit / 2), limit, limit)

    @property
    def response_variance(self) -> float:
        """Variance of response tokens that mean and 95th percentile stand for."""
        return ((self.response_p95 - self.response_mean) / _P95_DEVIATIONS) ** 2

    @property
    def response_square(self) -> float:
        """Mean square of response tokens."""
        return self.response_mean**2 + self.response_variance

    @property
    def total_mean(self) -> float:
        """Mean tokens of a whole sequence."""
        return self.prompt_mean + self.response_mean

    @property
    def total_square(self) -> float:
        """Mean square of the tokens of a whole sequence."""
        return self.total_mean**2 + self.response_variance

    @property
    def total_max(self) -> float:
        """Tokens of the longest sequence: what a micro-batch has to hold."""
        return self.prompt_mean + self.response_max

    def longest_of(self, sequences: FloatArray, batch: int) -> FloatArray:
        """Expected longest response among so many of a batch: when their decoding ends.

        One sequence has the mean, 20 have the 95th percentile, the whole batch has the maximum;
        between these the expectation is linear in the logarithm of the number (as for exponential
        tails). A batch of 20 or fewer goes from mean to maximum.
        """
        ends = [(1.0, self.response_mean)]
        ends += [(20.0, self.response_p95)] if batch > 20 else []
        ends += [(float(batch), self.response_max)] if batch > 1 else []
        numbers, tokens = zip(*ends, strict=True)
        found = np.interp(np.log(np.maximum(1.0, sequences)), np.log(numbers), tokens)
        return np.asarray(found)
