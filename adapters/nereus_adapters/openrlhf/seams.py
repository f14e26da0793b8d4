"""The names of OpenRLHF that the adapter stands on; checked by ``ast`` before Ray starts.

Those of Ray, DeepSpeed and vLLM are in `seams_below.py`.
"""

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
    # Mode adapt: processes that hold handles of their own, told of new ones.
    Seam(_ASYNC, "GenerateSamplesActor.fit", ("self", "episode", "total_consumed_prompts")),
    Seam(_LAUNCHER, "RayActorGroup.async_save_model", ("self",)),
    Seam(
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator._generate_vllm",
        ("self", "dataloader_iter", "num_prompts", "dynamic_filtering"),
    ),
    # What is done again when a node was lost in the middle of it.
    Seam(
        "openrlhf.trainer.ppo_utils.experience_maker",
        "RemoteExperienceMaker.make_experience_batch",
        ("self", "rollout_samples"),
    ),
    Seam(_TRAINER, "BasePPOTrainer.ppo_train", ("self", "global_steps")),
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
    # An asynchronous job's end is heard of where its generator and its trainer are waited for.
    Seam(_ASYNC, "PPOTrainerAsync.fit", ("self",)),
    Seam(_ASYNC, "PPOTrainerAsync.trainer_actor"),
    Seam(_ASYNC, "TrainingActor.vllm_lock"),
    Seam(_ASYNC, "TrainingActor.rollout_queue"),
    Seam(_ASYNC, "TrainingActor.rollout_slots"),
    # What is read: groups of ranks, engines and where they are.
    *(
        Seam(_TRAINER, f"BasePPOTrainer.{name}")
        for name in (
            "args",
            "strategy",
            "vllm_engines",
            "experience_maker",
            "actor_model_group",
            "critic_model_group",
            "reference_model_group",
            "reward_model_group",
        )
    ),
    Seam(_TRAINER, "PPOTrainer.samples_generator"),
    Seam("openrlhf.trainer.ppo_utils.samples_generator", "SamplesGenerator.vllm_engines"),
    Seam(_LAUNCHER, "RayActorGroup._actor_handlers"),
    Seam(_LAUNCHER, "RayActorGroup.ray_actor_type"),
    Seam(_LAUNCHER, "RayActorGroup.duplicate_actors"),
    # What is written, so that a group or a rank takes another place.
    *(
        Seam(_LAUNCHER, name, to_change=True)
        for name in (
            "RayActorGroup._num_nodes",
            "RayActorGroup._num_gpus_per_node",
            "BaseDistributedActor._rank",
            "BaseDistributedActor._world_size",
            "BaseDistributedActor._master_addr",
            "BaseDistributedActor._master_port",
        )
    ),
    Seam("openrlhf.utils.deepspeed", "DeepspeedStrategy.ds_device_mesh", to_change=True),
    Seam("openrlhf.utils.deepspeed", "DeepspeedStrategy.ds_tensor_parallel_size", to_change=True),
    Seam(_ACTOR, "ActorPPOTrainer.vllm_engines", to_change=True),
    Seam(_ENGINE, "RolloutRayActor.llm"),
    Seam(_ACTOR, "ActorPPOTrainer.use_cuda_ipc"),
    Seam(_ACTOR, "PolicyModelActor.max_steps"),
    Seam(_ACTOR, "PolicyModelActor.trainer"),
    Seam(_LAUNCHER, "RayActorGroup.async_run_method", ("self", "method_name")),
    Seam(_LAUNCHER, "RayActorGroup.async_run_method_batch", ("self", "method_name")),
    # What the driver makes of its arguments; the conformance harness stands in for the driver.
    Seam("openrlhf.utils.utils", "get_strategy", ("args",)),
    # Mode adapt: what builds a rank, an engine, the weight-sync group, and what cuts batches.
    Seam(
        _LAUNCHER,
        "BaseDistributedActor.__init__",
        ("self", "world_size", "rank", "master_addr", "master_port"),
    ),
    Seam(
        _LAUNCHER,
        "ReferenceModelActor.init_model_from_pretrained",
        ("self", "strategy", "pretrain"),
    ),
    Seam(
        _LAUNCHER, "RewardModelActor.init_model_from_pretrained", ("self", "strategy", "pretrain")
    ),
    Seam(
        _ACTOR,
        "PolicyModelActor.init_model_from_pretrained",
        ("self", "strategy", "pretrain", "max_steps", "vllm_engines"),
    ),
    Seam(
        "openrlhf.trainer.ray.ppo_critic",
        "CriticModelActor.init_model_from_pretrained",
        ("self", "strategy", "pretrain", "max_steps"),
    ),
    Seam(_ACTOR, "PolicyModelActor.broadcast_to_vllm", ("self",)),
    Seam(_ACTOR, "ActorPPOTrainer._init_vllm_sync_group", ("self", "backend")),
    Seam(
        _ENGINE,
        "RolloutRayActor._configure_device_env",
        ("self", "backend", "bundle_indices", "num_gpus"),
    ),
    Seam(_ENGINE, "RolloutRayActor.generate", ("self", "prompt_token_ids", "sampling_params")),
    Seam(_ENGINE, "RolloutRayActor.get_num_unfinished_requests", ("self",)),
    Seam(_ENGINE, "RolloutRayActor.wake_up", ("self", "tags")),
    Seam(
        _ENGINE,
        "create_vllm_engines",
        (
            "num_engines",
            "tensor_parallel_size",
            "pretrain",
            "seed",
            "full_determinism",
            "enable_prefix_caching",
            "enforce_eager",
            "max_model_len",
            "shared_pg",
            "gpu_memory_utilization",
            "vllm_enable_sleep",
            "logprobs_mode",
            "agent_func_path",
            "remote_rm_url",
        ),
    ),
    Seam(
        "openrlhf.trainer.ppo_utils.experience_maker",
        "RemoteExperienceMaker._dispatch_forward",
        ("self", "group", "sync_condition"),
    ),
    Seam(
        "openrlhf.trainer.ppo_utils.experience_maker",
        "RemoteExperienceMaker._flatten_results",
        ("self", "refs", "duplicate_factor"),
    ),
    Seam("openrlhf.trainer.ray.utils", "get_bundle_indices", ("placement_group", "index")),
)
