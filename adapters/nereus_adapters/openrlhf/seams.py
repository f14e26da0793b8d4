"""The names of OpenRLHF that the adapter stands on; checked by ``ast`` before Ray starts."""

from __future__ import annotations

from nereus_core.declaration import Seam

_TRAINER = "openrlhf.trainer.ppo_trainer"
_ASYNC = "openrlhf.trainer.ppo_trainer_async"
_LAUNCHER = "openrlhf.trainer.ray.launcher"
_ACTOR = "openrlhf.trainer.ray.ppo_actor"
_ENGINE = "openrlhf.trainer.ray.vllm_engine"

SEAMS = (
    # Where the plugin stands: the loop of the synchronous and of the asynchronous trainer.
    Seam(_TRAINER, "PPOTrainer.fit", ("self", "global_step")),
    Seam(_ASYNC, "TrainingActor.fit", ("self", "global_step")),
    # What is called once per step, on the trainer that the adapter was given.
    Seam(_TRAINER, "BasePPOTrainer.train_step", ("self", "rollout_samples", "global_step")),
    Seam(
        _TRAINER,
        "BasePPOTrainer.save_logs_and_checkpoints",
        ("self", "global_step", "logs_dict", "client_states"),
    ),
    Seam(_TRAINER, "BasePPOTrainer.broadcast_to_vllm", ("self",)),
    Seam(_ASYNC, "VLLMLock.acquire", ("self",)),
    Seam(_ASYNC, "VLLMLock.release", ("self",)),
    # What is read: groups of ranks, engines and where they are.
    Seam(_LAUNCHER, "RayActorGroup.async_run_method", ("self", "method_name")),
    Seam(_LAUNCHER, "RayActorGroup.async_run_method_batch", ("self", "method_name")),
    Seam("openrlhf.trainer.ray.utils", "get_bundle_indices", ("placement_group", "index")),
)
