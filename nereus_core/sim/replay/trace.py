"""Trace: what a run goes through, step by step. Reading files is the business of who has them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nereus_core.cluster import Device
from nereus_core.observation import TokenStats, clip_ratio
from nereus_core.workload import Job, ModelStage


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths, devices and slow spells by RL step."""

    name: str
    source: str
    """What was measured where, and what was made of it."""
    response_mean: tuple[float, ...]
    """Mean response tokens of each step; as many as the run has steps."""
    prompt_mean: tuple[float, ...]
    shape: tuple[float, ...]
    """Response lengths in order, as factors of their mean: the distribution within a step."""
    nodes: tuple[frozenset[str], ...] = ()
    """Nodes offered in each step; empty: all, always. Leaving is announced one step before."""
    slow: Mapping[ModelStage, tuple[float, ...]] = field(default_factory=dict)
    """Factors on the seconds of a stage by step, where they were measured; 1 elsewhere."""

    def __post_init__(self) -> None:
        steps = len(self.response_mean)
        lengths = {len(self.prompt_mean), len(self.nodes) or steps, *map(len, self.slow.values())}
        if not steps or not self.shape or lengths - {steps}:
            raise ValueError(f"trace {self.name!r} has {steps} steps and columns of {lengths}")

    @property
    def num_steps(self) -> int:
        """RL steps of the run."""
        return len(self.response_mean)

    def offered(self, step: int, devices: Sequence[Device]) -> frozenset[Device]:
        """Devices that a step may use; the last step's hold for ever after."""
        if not self.nodes:
            return frozenset(devices)
        nodes = self.nodes[min(step, self.num_steps - 1)]
        return frozenset(d for d in devices if d.node in nodes)

    def factor(self, stage: ModelStage, step: int) -> float:
        """Factor on a stage's seconds in a step."""
        return self.slow[stage][step] if stage in self.slow else 1.0

    def responses(self, step: int, job: Job, seed: int) -> tuple[TokenStats, float]:
        """Draw a step's responses; returns their lengths and the part that was clipped.

        One response of each quantile of the shape, at a random place within it: the sample has the
        shape's tail whatever the seed.
        """
        draw = random.Random(f"{seed} {self.name} {step}")
        number, size = job.global_batch, len(self.shape)
        mean, limit = self.response_mean[step], job.max_response_tokens
        places = (int((i + draw.random()) * size / number) for i in range(number))
        lengths = [max(1, min(limit, round(mean * self.shape[p]))) for p in places]
        return TokenStats.of(lengths), clip_ratio(lengths, limit) or 0.0

    def prompts(self, step: int, job: Job) -> TokenStats:
        """A step's prompts, all of the mean length."""
        return TokenStats.of([max(1, round(self.prompt_mean[step]))] * job.global_batch)
