"""Recorder: sees each step of a verl trainer pass, from verl's own timings and batch tags.

It wraps ``step`` of one trainer object. No device is touched and nothing is measured twice: verl
times its phases, and its batches carry the length of every sequence on the driver.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereus_core.observation import TokenStats, clip_ratio
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER, ModelStage

PHASES: Mapping[str, ModelStage] = {
    "gen": ACTOR_GENERATE,
    "old_log_prob": ACTOR_TRAIN,
    "update_actor": ACTOR_TRAIN,
    "ref": REF_INFER,
    "values": CRITIC_TRAIN,
    "update_critic": CRITIC_TRAIN,
}
"""verl's timers and the model-stage whose engine works in them: the actor's own engine recomputes
old log-probs, the critic's computes values."""
_REPORTED = ("critic/rewards/mean", "critic/score/mean", "actor/pg_loss", "actor/loss")
_REPORTED_TRAINING = ("actor/grad_norm", "actor/entropy", "actor/ppo_kl", "critic/vf_loss")
POLL_S = 2.0
"""As verl has it where a sampler does not say (trainer_separate_async.py, _step_had_idle)."""
_PEAK = "perf/max_memory_allocated_gb"


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One completed step."""

    step: int
    """From 0; verl counts from 1."""
    step_s: float
    stage_s: Mapping[ModelStage, float]
    prompt_tokens: TokenStats
    response_tokens: TokenStats
    clip_ratio: float | None
    peak_bytes: Mapping[str, int]
    """Largest allocation of any rank, by role. The first of each role is left out: its optimizer
    had no moments yet, so that peak is like no other."""
    metrics: Mapping[str, float]


class Recorder:
    """Records the steps of one trainer until `stop`.

    Args:
        trainer: verl's PPOTrainer.
        max_response_tokens: A response of this length was perhaps cut off.
    """

    def __init__(self, trainer: Any, max_response_tokens: int) -> None:
        self._trainer, self._limit = trainer, max_response_tokens
        self._step = trainer.step
        self._begun_s: float | None = None
        self._last: tuple[Any, Mapping[str, Any]] | None = None
        self._earlier: Mapping[str, float] = {}
        self._out_s = 0.0
        self._trained: set[str] = set()
        self.amid_step = False
        """Whether a step is under way: its batch is sampled, or still to come."""
        trainer.step = self._recorded

    def stop(self) -> None:
        """Give the trainer its own method back."""
        self._trainer.step = self._step

    def leave_out(self, seconds: float) -> None:
        """Leave seconds, spent in a transition, out of the step in progress."""
        self._out_s += seconds

    def drained(self) -> SeenStep | None:
        """Return the step completed since the last call, None where there is none."""
        if self._last is None or self._begun_s is None:
            return None
        batch, metrics = self._last
        timing = self._trainer.timing_raw
        now_s = time.perf_counter()
        # What the user asked for beside training is not the plan's doing.
        aside_s = self._earlier.get("testing", 0.0) + timing.get("save_checkpoint", 0.0)
        step_s = now_s - self._begun_s - self._out_s - aside_s
        self._begun_s, self._last, self._out_s, self._earlier = now_s, None, 0.0, timing
        tags = [tag for tag in batch.tags if not tag.get("is_padding", False)]
        responses = [int(tag["response_len"]) for tag in tags if "response_len" in tag]
        stage_s: dict[ModelStage, float] = {}
        for phase, stage in PHASES.items():
            if phase in timing:
                stage_s[stage] = stage_s.get(stage, 0.0) + timing[phase]
        if self._trainer.trainer_mode == "separate_async":
            # verl times how long the trainers waited. Where they did, replicas were busy all the
            # while; where not, nobody knows how long these responses took.
            waited_s = stage_s.pop(ACTOR_GENERATE, 0.0)
            looks = self._trainer.parameter_sync_step
            each_s = getattr(self._trainer.replay_buffer, "poll_interval", POLL_S)
            if waited_s > looks * each_s:
                stage_s[ACTOR_GENERATE] = max(0.0, step_s)
        return SeenStep(
            self._trainer.global_steps - 1,
            max(0.0, step_s),
            stage_s,
            TokenStats.of([int(tag["prompt_len"]) for tag in tags if "prompt_len" in tag]),
            TokenStats.of(responses),
            clip_ratio(responses, self._limit),
            self._peaks(metrics),
            {
                key: float(metrics[key])
                for key in (*_REPORTED, *_REPORTED_TRAINING)
                if key in metrics
            },
        )

    def _peaks(self, metrics: Mapping[str, Any]) -> dict[str, int]:
        found = {
            role: int(float(metrics[f"{role}/{_PEAK}"]) * 2**30)
            for role in ("actor", "critic")
            if f"{role}/{_PEAK}" in metrics
        }
        again = {role: peak for role, peak in found.items() if role in self._trained}
        self._trained |= set(found)
        return again

    def _recorded(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        if self._begun_s is None:
            self._begun_s = time.perf_counter()
        self.amid_step = True
        try:
            batch = self._step(metrics, timing_raw)
        finally:
            self.amid_step = False
        self._last = (batch, metrics)
        return batch
