"""Steps: the stages of one RL step, each run by its units; what they give goes into a Rollout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.torch.channel import Answer, Pending
from nereus_adapters.torch.engine import Batch, Generated, LossSpec, TrainMetrics
from nereus_adapters.torch.engines import generated
from nereus_adapters.torch.fleet import Fleet
from nereus_adapters.torch.rl import advantages
from nereus_adapters.torch.rl.rollout import (
    Prompt,
    Rollout,
    joined,
    sequence_seed,
    slices,
    stacked,
)
from nereus_adapters.torch.rl.tasks import Task
from nereus_adapters.torch.settings import RlSettings
from nereus_core.errors import ConfigError, UnitLost
from nereus_core.gate import Gate
from nereus_core.units import Unit, UnitId
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    CRITIC_INFER,
    CRITIC_TRAIN,
    REF_INFER,
    Job,
    ModelStage,
    Stage,
)

_SAMPLED, _GREEDY = 0, 1


class Steps:
    """Runs stages on a fleet. Stages that do not need one another run at the same time."""

    def __init__(
        self, job: Job, fleet: Fleet, gate: Gate, task: Task, settings: RlSettings
    ) -> None:
        self._job, self._fleet, self._gate = job, fleet, gate
        self._task, self._settings = task, settings
        self.engines: RolloutJob | None = None
        """What generates, where the seats do not."""
        self.stage_s: dict[ModelStage, float] = {}
        """Seconds of each stage in the step under way: its slowest seat."""

    def begin(self, step: int) -> Rollout:
        """Ask the task for the step's prompts.

        Raises:
            ConfigError: the task gives another number of prompts, or one too long.
        """
        copies = self._settings.responses_per_prompt
        given = self._task.prompts(step)
        if len(given) * copies != self._job.global_batch:
            raise ConfigError(
                "job.prompts_per_step",
                f"the task gave {len(given)} prompts at step {step}; with {copies} responses each "
                f"that is not the global batch of {self._job.global_batch}",
            )
        longest = max(len(tokens) for _, tokens in given)
        if longest > self._job.max_prompt_tokens:
            raise ConfigError(
                "job.max_prompt_tokens", f"{self._job.max_prompt_tokens} < a prompt of {longest}"
            )
        prompts = [Prompt(i, tuple(tokens)) for i, tokens in given for _ in range(copies)]
        return Rollout(step, tuple(prompts))

    def generate(self, rollout: Rollout) -> None:
        """Sample a response per sequence, and a greedy one where the algorithm needs it."""
        if rollout.generated is not None:
            return
        if self.engines is not None:
            self._generate_on(self.engines, rollout)
            return
        with self._gate.stages(ACTOR_GENERATE):
            sampled = self._send_generate(rollout, _SAMPLED)
            passes = self._job.workload.node(ACTOR_GENERATE).passes
            greedy = self._send_generate(rollout, _GREEDY) if passes > 1 else []
            answers = self._settle(ACTOR_GENERATE, [*sampled, *greedy])
        parts = [a.value for a in answers[: len(sampled)] if a.value is not None]
        if greedy:
            others = [a.value for a in answers[len(sampled) :] if a.value is not None]
            rollout.greedy = joined(others)
        rollout.generated = joined(parts)

    def _generate_on(self, engines: RolloutJob, rollout: Rollout) -> None:
        """Do `generate` on rollout engines."""
        settings = self._settings
        bound = min(self._job.max_response_tokens, self._task.max_response_tokens(rollout.step))

        def responses(kind: int) -> Generated:
            seeds = [
                sequence_seed(settings.seed, rollout.step, i, kind)
                for i in range(len(rollout.prompts))
            ]
            return generated(
                engines,
                [p.tokens for p in rollout.prompts],
                seeds,
                max_tokens=bound,
                temperature=0.0 if kind == _GREEDY else settings.temperature,
                eos_id=settings.eos_id,
                name=f"{rollout.step}.{kind}",
            )

        start_s = time.perf_counter()
        with self._gate.stages(ACTOR_GENERATE):
            if self._job.workload.node(ACTOR_GENERATE).passes > 1:
                rollout.greedy = responses(_GREEDY)
            rollout.generated = responses(_SAMPLED)
        self.stage_s[ACTOR_GENERATE] = time.perf_counter() - start_s

    def _send_generate(self, rollout: Rollout, kind: int) -> list[Pending]:
        settings = self._settings
        units = self._units(ACTOR_GENERATE)
        bound = min(self._job.max_response_tokens, self._task.max_response_tokens(rollout.step))
        shares: dict[UnitId, Mapping[str, Any]] = {}
        for unit, part in zip(units, slices(len(rollout.prompts), len(units)), strict=True):
            places = range(part.start, part.stop)
            shares[unit.id] = {
                "prompts": [list(p.tokens) for p in rollout.prompts[part]],
                "max_new_tokens": bound,
                "temperature": settings.temperature,
                "eos_id": settings.eos_id,
                "seeds": [sequence_seed(settings.seed, rollout.step, i, kind) for i in places],
                "greedy": kind == _GREEDY,
            }
        return self._fleet.send(shares, "generate")

    def score(self, rollout: Rollout) -> None:
        """Reference log-probabilities, values and rewards; then advantages."""
        if rollout.batch is not None:
            return
        batch = rollout.sequences
        stages = [n.model_stage for n in self._job.workload.nodes]
        wanted = [s for s in stages if s.stage is Stage.INFER]
        with self._gate.stages(*wanted):
            sent = {stage: self._send_infer(stage, batch) for stage in wanted}
            width = batch.tokens.shape[1]
            found = {
                stage: stacked(
                    [a.value for a in self._settle(stage, calls) if a.value is not None], width
                )
                for stage, calls in sent.items()
            }
        assert rollout.generated is not None
        rollout.scores = torch.tensor(
            [
                self._task.score(prompt.id, tokens)
                for prompt, tokens in zip(rollout.prompts, rollout.generated.tokens, strict=True)
            ],
            dtype=torch.float64,
        )
        rollout.batch = self._with_advantages(
            rollout, batch, found.get(REF_INFER), found.get(CRITIC_INFER)
        )

    def _send_infer(self, stage: ModelStage, batch: Batch) -> list[Pending]:
        method = "values" if self._job.model(stage).head == "value" else "logprobs"
        units = self._units(stage)
        shares = {
            unit.id: {"batch": batch.rows(part.start, part.stop), "micro_batch": self._micro}
            for unit, part in zip(units, slices(len(batch), len(units)), strict=True)
        }
        return self._fleet.send(shares, method)

    def _with_advantages(
        self, rollout: Rollout, batch: Batch, ref: torch.Tensor | None, values: torch.Tensor | None
    ) -> Batch:
        settings, mask, scores = self._settings, batch.response_mask, rollout.scores
        assert scores is not None
        assert ref is not None
        old = rollout.old_logprobs(batch)
        batch = replace(batch, old_logprobs=old, ref_logprobs=ref)
        algorithm = self._job.workload.algorithm
        if algorithm == "grpo":
            found = advantages.grpo(scores, settings.responses_per_prompt, mask)
            return replace(batch, advantages=found)
        rewards = advantages.token_rewards(scores, mask, old, ref, settings.kl_coef)
        if algorithm == "remax":
            assert rollout.greedy is not None
            baselines = torch.tensor(
                [
                    self._task.score(prompt.id, tokens)
                    for prompt, tokens in zip(rollout.prompts, rollout.greedy.tokens, strict=True)
                ],
                dtype=torch.float64,
            )
            return replace(batch, advantages=advantages.remax(rewards, baselines, mask))
        assert values is not None
        found, returns = advantages.gae(rewards, values, mask, settings.gamma, settings.gae_lambda)
        return replace(
            batch,
            advantages=advantages.whitened(found, mask),
            returns=returns,
            old_values=values,
        )

    def train(self, rollout: Rollout) -> None:
        """Update every trained model that has not been updated yet.

        Raises:
            Exception: of a seat that failed; what was done all the same is in the rollout.
        """
        stages = [
            n.model_stage
            for n in self._job.workload.nodes
            if n.model_stage.stage is Stage.TRAIN and n.model_stage.model not in rollout.metrics
        ]
        if not stages:
            return
        with self._gate.stages(*stages):
            sent = {stage: self._send_train(stage, rollout) for stage in stages}
            errors: list[Exception] = []
            for stage, calls in sent.items():
                try:
                    metrics, _ = self._settle(stage, calls)[0].value
                except Exception as error:
                    errors.append(error)
                    metrics = self._done_all_the_same(calls)
                if metrics is not None:
                    rollout.metrics[stage.model] = metrics
            if errors:
                raise errors[0]

    def _done_all_the_same(self, calls: Sequence[Pending]) -> TrainMetrics | None:
        """Return metrics that a seat gave although another one failed."""
        alive = self._fleet.pool.alive
        for call in calls:
            if call.device in alive and call.future.done() and call.future.exception() is None:
                metrics: TrainMetrics = call.future.result().value[0]
                return metrics
        return None

    def _send_train(self, stage: ModelStage, rollout: Rollout) -> list[Pending]:
        batch, units = rollout.batch, self._units(stage)
        assert batch is not None
        loss = self._loss(stage, float(batch.response_mask.sum()))
        shares = {
            unit.id: {
                "batch": batch.rows(part.start, part.stop),
                "loss": loss,
                "micro_batch": self._micro,
            }
            for unit, part in zip(units, slices(len(batch), len(units)), strict=True)
        }
        return self._fleet.send(shares, "train")

    def _loss(self, stage: ModelStage, num_tokens: float) -> LossSpec:
        settings = self._settings
        if stage == CRITIC_TRAIN:
            return LossSpec("value", num_tokens, clip=settings.value_clip)
        assert stage == ACTOR_TRAIN
        # ppo and remax have the penalty in their rewards already.
        kl_coef = settings.kl_coef if self._job.workload.algorithm == "grpo" else 0.0
        return LossSpec(
            "policy",
            num_tokens,
            clip=settings.clip,
            kl_coef=kl_coef,
            entropy_coef=settings.entropy_coef,
        )

    @property
    def _micro(self) -> int:
        return self._job.micro_batch

    def _units(self, stage: ModelStage) -> tuple[Unit, ...]:
        units = self._fleet.units
        if not units.of(stage):
            raise UnitLost([stage], tuple(units), f"{stage} has no unit")
        return units.of(stage)

    def _settle(self, stage: ModelStage, calls: Sequence[Pending]) -> list[Answer]:
        answers = self._fleet.settle(calls, self._settings.step_s)
        spent = max((a.elapsed_s for a in answers), default=0.0)
        self.stage_s[stage] = self.stage_s.get(stage, 0.0) + spent
        return answers
