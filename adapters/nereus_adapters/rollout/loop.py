"""Loop: RL steps over a RolloutJob and an HfTrainer, for the conformance harness and the tests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from nereus_adapters.rollout.figures import StepFigures
from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.rollout.ports import Completion, Prompt, Sampling
from nereus_adapters.rollout.trainer import HfTrainer, Sample
from nereus_core.errors import UnitLost, WaitTimeout
from nereus_core.harness import StepResult
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    CRITIC_INFER,
    CRITIC_TRAIN,
    REF_INFER,
    ModelStage,
)

_STOP = 2
"""Token that ends a response: the model's own."""


class Loop:
    """One step after another; prompts are numbered, and the same on every run."""

    def __init__(self, running: RolloutJob, trainer: HfTrainer, *, wait_s: float) -> None:
        self.running, self.trainer, self._wait_s = running, trainer, wait_s
        self._position = 0
        self._waiting: list[tuple[Prompt, Future[Completion]]] = []
        self._samples: list[Sample] = []
        self._stage_s: dict[ModelStage, float] = {}

    def step(self) -> StepResult:
        """Run one step.

        Raises:
            UnitLost: a unit went with a device; the prompts that were drawn are used again.
        """
        running, gate = self.running, self.running.gate
        with gate.step():
            start_s = time.perf_counter()
            self._stage_s = {}
            self._require_units()
            with self._timed(ACTOR_GENERATE), gate.stages(ACTOR_GENERATE):
                samples = self._generated()
            served = running.fleet.served()
            if running.job.workload.asynchronous:
                self._submit()
                with gate.critical():
                    losses, norms = self._trained(samples)
            else:
                losses, norms = self._trained(samples)
            self._samples = []
            step_s = time.perf_counter() - start_s
            running.stepped(
                StepFigures(step_s, self._stage_s, {f"{m}/loss": v for m, v in losses.items()})
            )
            return StepResult(
                step=running.steps - 1,
                losses=losses,
                sample_ids=tuple(sample.id for sample in samples),
                weight_version=served,
                grad_norms=norms,
            )

    def _require_units(self) -> None:
        self.running.heard()
        units = self.running.units
        for stage in self.running.job.workload.stages:
            if not units.of(stage):
                raise UnitLost([stage], tuple(units), f"{stage} has no unit")

    def _trained(self, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
        trainer, gate = self.trainer, self.running.gate
        critic = "critic" in self.running.job.models
        infer = (REF_INFER, CRITIC_INFER) if critic else (REF_INFER,)
        with gate.stages(*infer):
            with self._timed(REF_INFER):
                reference = trainer.reference(samples)
            if critic:
                with self._timed(CRITIC_INFER):
                    trainer.values(samples)
        losses, norms = {}, {}
        if critic:
            with self._timed(CRITIC_TRAIN), gate.stages(CRITIC_TRAIN):
                losses["critic"], norms["critic"] = trainer.train_critic(samples)
        with self._timed(ACTOR_TRAIN), gate.stages(ACTOR_TRAIN):
            losses["actor"], norms["actor"] = trainer.train_actor(samples, reference)
        with gate.stages(ACTOR_GENERATE, receiving=True):
            self.running.sync()
        return losses, norms

    def _generated(self) -> list[Sample]:
        """Return the step's samples; a step that was cut short left them."""
        if self._samples:
            return self._samples
        if not self._waiting:
            self._submit()
        deadline_s = time.monotonic() + self._wait_s
        found = []
        for prompt, future in self._waiting:
            try:
                found.append(future.result(max(0.0, deadline_s - time.monotonic())))
            except TimeoutError:
                raise WaitTimeout(f"the response to {prompt.id}", self._wait_s) from None
        prompts, self._waiting = [p for p, _ in self._waiting], []
        self.running.note(prompts, found)
        self._samples = [
            Sample(int(p.id), p.tokens, c.tokens, reward(c.tokens))
            for p, c in zip(prompts, found, strict=True)
        ]
        return self._samples

    def _submit(self) -> None:
        job = self.running.job
        first, self._position = self._position, self._position + job.global_batch
        self._waiting = []
        for i in range(first, self._position):
            sampling = Sampling(job.max_response_tokens, stop_ids=(_STOP,), seed=i)
            prompt = Prompt(str(i), tokens_of(i), sampling)
            self._waiting.append((prompt, self.running.fleet.submit(prompt)))

    @contextmanager
    def _timed(self, stage: ModelStage) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._stage_s[stage] = time.perf_counter() - start_s


def tokens_of(index: int) -> tuple[int, ...]:
    """Return the tokens of a prompt, by its number."""
    drawn = np.random.default_rng(index).integers(3, 300, 4 + index % 4)
    return (1, *map(int, drawn))


def reward(tokens: Sequence[int]) -> float:
    """Reward even tokens: anything that depends on the response will do."""
    return sum(t % 2 == 0 for t in tokens) / max(1, len(tokens))
