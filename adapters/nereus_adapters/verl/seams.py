"""The names in verl that adapter and plugin stand on; `nereus doctor verl` reads verl's source."""

from __future__ import annotations

from nereus_core.declaration import Seam

_TRAINER = "verl.trainer.ppo.v1.trainer_base"

SEAMS = (
    # What the plugin turns: trainers by mode, their loop, its boundary, its metrics.
    Seam(_TRAINER, "TRAINER_REGISTRY"),
    Seam(_TRAINER, "get_trainer_cls", ("name",)),
    Seam(_TRAINER, "PPOTrainer", ("self", "config")),
    Seam(_TRAINER, "PPOTrainer.fit", ("self", "agent_loop_manager")),
    Seam(_TRAINER, "PPOTrainer.step", ("self", "metrics", "timing_raw")),
    Seam(_TRAINER, "PPOTrainer.on_step_end", ("self",)),
    Seam(_TRAINER, "PPOTrainer._compute_metrics", ("self", "batch", "metrics", "timing_raw")),
    Seam("verl.trainer.ppo.v1", "get_trainer_cls"),
    Seam("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync.on_step_end", ("self",)),
    Seam("verl.trainer.ppo.v1.trainer_colocate_async", "PPOTrainerColocateAsync.on_step_end"),
    Seam("verl.trainer.ppo.v1.trainer_separate_async", "PPOTrainerSeparateAsync.on_step_end"),
    # What the adapter reads: worker processes and their engines.
    Seam("verl.single_controller.ray.base", "RayWorkerGroup.workers"),
    Seam("verl.workers.engine_workers", "TrainingWorker", ("self", "config")),
    Seam("verl.workers.engine_workers", "ActorRolloutRefWorker", ("self", "config", "role")),
    Seam("verl.workers.engine.fsdp.transformer_impl", "FSDPEngine"),
    Seam("verl.workers.rollout.llm_server", "LLMServerManager.get_replicas", ("self",)),
    Seam("verl.workers.rollout.replica", "RolloutReplica", ("self", "replica_rank", "config")),
)
