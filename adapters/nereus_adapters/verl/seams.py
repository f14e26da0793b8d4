"""The names in verl that adapter and plugin stand on; `nereus doctor verl` reads verl's source."""

from __future__ import annotations

from nereus_core.declaration import Seam

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_WORKERS = "verl.workers.engine_workers"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_ENGINES = "verl.workers.config.engine"
_CHECKPOINTS = "verl.utils.checkpoint.checkpoint_manager"

SEAMS = (
    # What the plugin turns: trainers by mode, their loop, its boundary, its metrics.
    Seam(_TRAINER, "TRAINER_REGISTRY"),
    Seam(_TRAINER, "get_trainer_cls", ("name",)),
    Seam(_TRAINER, "PPOTrainer", ("self", "config")),
    Seam(_TRAINER, "PPOTrainer.fit", ("self", "agent_loop_manager")),
    Seam(_TRAINER, "PPOTrainer.step", ("self", "metrics", "timing_raw")),
    Seam(_TRAINER, "PPOTrainer.on_step_end", ("self",)),
    Seam(_TRAINER, "PPOTrainer._balance_batch", ("self", "batch", "metrics")),
    Seam(_TRAINER, "PPOTrainer._compute_metrics", ("self", "batch", "metrics", "timing_raw")),
    Seam("verl.trainer.ppo.v1", "get_trainer_cls"),
    Seam("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync.on_step_end", ("self",)),
    Seam("verl.trainer.ppo.v1.trainer_colocate_async", "PPOTrainerColocateAsync.on_step_end"),
    Seam("verl.trainer.ppo.v1.trainer_separate_async", "PPOTrainerSeparateAsync.on_step_end"),
    # What the adapter reads: worker processes and their engines.
    Seam("verl.single_controller.ray.base", "RayWorkerGroup.workers"),
    Seam("verl.single_controller.ray.base", "RayWorkerGroup.worker_names"),
    Seam(_WORKERS, "TrainingWorker", ("self", "config")),
    Seam(_WORKERS, "ActorRolloutRefWorker", ("self", "config", "role")),
    Seam(_ENGINE, "FSDPEngine", ("self", "model_config", "engine_config", "optimizer_config")),
    Seam("verl.workers.rollout.llm_server", "LLMServerManager.get_replicas", ("self",)),
    # What it changes: ranks that part and meet, engines built from shards.
    Seam("verl.single_controller.ray.base", "RayResourcePool"),
    Seam(
        "verl.single_controller.ray.base",
        "RayWorkerGroup.from_detached",
        ("cls", "name_prefix", "worker_names", "worker_handles", "ray_cls_with_init"),
    ),
    Seam("verl.single_controller.base.worker", "Worker.get_dispatch_collect", ("self",)),
    Seam(
        "verl.single_controller.base.worker",
        "Worker.execute_with_func_generator",
        ("self", "func"),
    ),
    Seam(
        "verl.single_controller.base.worker",
        "Worker.set_dispatch_collect",
        ("self", "mesh_name", "dispatch_dp_rank", "collect_dp_rank"),
    ),
    Seam(_WORKERS, "TrainingWorker.reset", ("self",)),
    Seam(_WORKERS, "TrainingWorker.set_loss_fn", ("self", "loss_fn")),
    Seam(_WORKERS, "ActorRolloutRefWorker.init_model", ("self",)),
    Seam(_ENGINE, "FSDPEngine.initialize", ("self",)),
    Seam(_ENGINE, "FSDPEngine._init_device_mesh", ("self",)),
    Seam(_ENGINE, "FSDPEngine._build_module", ("self",)),
    # Nereus's own engine: how verl finds it, and what of verl's it is made from.
    Seam(
        "verl.workers.engine.base",
        "EngineRegistry.register",
        ("cls", "model_type", "backend", "device", "vendor"),
    ),
    Seam("verl.workers.engine.base", "EngineRegistry.get_engine_cls", ("model_type", "backend")),
    Seam("verl.workers.engine.base", "EngineRegistry._engines"),
    Seam(_ENGINE, "FSDPEngineWithLMHead"),
    Seam(_ENGINE, "FSDPEngineWithValueHead"),
    Seam(_ENGINE, "FSDPEngine._build_fsdp_module", ("self", "module")),
    Seam(_ENGINE, "FSDPEngine.is_mp_src_rank_with_outputs", ("self",)),
    Seam(_ENGINE, "FSDPEngine.get_data_parallel_rank", ("self",)),
    Seam(_ENGINE, "FSDPEngine.get_data_parallel_size", ("self",)),
    Seam(_ENGINE, "FSDPEngine.get_data_parallel_group", ("self",)),
    # Its pipeline stages: a batch, a step and the weights for rollouts, over all of them.
    Seam(
        _ENGINE,
        "FSDPEngine.forward_backward_batch",
        ("self", "data", "loss_function", "forward_only"),
    ),
    Seam(_ENGINE, "FSDPEngine._gradient_sync_context", ("self", "is_last_micro_batch")),
    Seam(_ENGINE, "FSDPEngine.optimizer_step", ("self",)),
    Seam(_ENGINE, "FSDPEngine.get_per_tensor_param", ("self",)),
    Seam(_ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", ("self", "micro_batch")),
    Seam(
        _ENGINE,
        "FSDPEngineWithLMHead.forward_step",
        ("self", "micro_batch", "loss_function", "forward_only"),
    ),
    Seam(
        "verl.workers.engine.utils",
        "prepare_micro_batches",
        ("data", "dp_group", "same_micro_num_in_dp"),
    ),
    Seam("verl.workers.engine.utils", "postprocess_batch_func", ("output_lst", "indices", "data")),
    Seam("verl.utils.fsdp_utils", "fsdp2_clip_grad_norm_", ("parameters", "max_norm")),
    Seam("verl.utils.tensordict_utils", "assign_non_tensor"),
    Seam("verl.utils.tensordict_utils", "get_non_tensor_data", ("data", "key", "default")),
    Seam("verl.utils.torch_dtypes", "PrecisionType.to_dtype"),
    Seam("verl.utils.model", "convert_weight_keys", ("state_dict", "model")),
    Seam("verl.utils.fsdp_utils", "apply_fsdp2", ("model", "fsdp_kwargs", "config")),
    Seam("verl.utils.fsdp_utils", "get_init_weight_context_manager", ("use_meta_tensor", "mesh")),
    Seam(
        "verl.utils.fsdp_utils",
        "fsdp2_load_full_state_dict",
        ("model", "full_state", "device_mesh", "cpu_offload"),
    ),
    Seam("verl.utils.model", "get_hf_auto_model_class", ("hf_config",)),
    Seam(
        "verl.utils.model",
        "load_valuehead_model",
        ("local_path", "torch_dtype", "model_config", "trust_remote_code"),
    ),
    Seam("verl.utils.config", "omega_conf_to_dataclass", ("config",)),
    Seam("verl.utils.device", "get_device_id"),
    Seam("verl.utils.device", "get_device_name"),
    Seam("verl.utils.device", "get_nccl_backend"),
    Seam("verl.utils.device", "get_torch_device"),
    # Ulysses: the degree that engines are built with, the mesh, and the group read at call time.
    Seam(_ENGINES, "FSDPEngineConfig.fsdp_size"),
    Seam(_ENGINES, "FSDPEngineConfig.ulysses_sequence_parallel_size"),
    Seam(_ENGINE, "FSDPEngine.get_data_parallel_rank", ("self",)),
    Seam(_ENGINE, "FSDPEngine.is_mp_src_rank_with_outputs", ("self",)),
    Seam("verl.utils.ulysses", "get_ulysses_sequence_parallel_group"),
    Seam(
        "verl.models.transformers.monkey_patch",
        "apply_monkey_patch",
        ("model", "ulysses_sp_size", "use_remove_padding"),
    ),
    # Megatron's knobs, which plans are translated into.
    Seam(_ENGINES, "McoreEngineConfig.tensor_model_parallel_size"),
    Seam(_ENGINES, "McoreEngineConfig.pipeline_model_parallel_size"),
    Seam(_ENGINES, "McoreEngineConfig.sequence_parallel"),
    Seam(_ENGINES, "McoreEngineConfig.use_distributed_optimizer"),
    Seam(_ENGINES, "McoreEngineConfig.override_transformer_config"),
    # Checkpoints of another number of ranks: what is replaced, and what it reads.
    Seam(_TRAINER, "PPOTrainer._load_checkpoint", ("self",)),
    Seam(_ENGINE, "FSDPEngine.load_checkpoint", ("self", "local_path")),
    Seam(
        "verl.utils.checkpoint.fsdp_checkpoint_manager",
        "FSDPCheckpointManager.load_checkpoint",
        ("self", "local_path"),
    ),
    Seam("verl.utils.checkpoint.fsdp_checkpoint_manager", "FSDPConfig"),
    Seam(_CHECKPOINTS, "BaseCheckpointManager.load_rng_state", ("rng_state",)),
    Seam(_CHECKPOINTS, "BaseCheckpointManager.should_load_model"),
    Seam(_CHECKPOINTS, "BaseCheckpointManager.should_load_optimizer"),
    Seam(_CHECKPOINTS, "BaseCheckpointManager.should_load_extra"),
    # Rollout replicas, their balancer, and the trainers' side of the weight synchronization.
    Seam("verl.workers.rollout.base", "get_rollout_class", ("rollout_name", "mode")),
    Seam("verl.workers.rollout.replica", "RolloutMode"),
    Seam(
        "verl.workers.rollout.replica",
        "RolloutReplica",
        ("self", "replica_rank", "config", "model_config", "gpus_per_node"),
    ),
    Seam("verl.workers.rollout.replica", "RolloutReplica.launch_servers", ("self",)),
    Seam("verl.workers.rollout.replica", "RolloutReplica.sleep", ("self",)),
    Seam("verl.workers.rollout.llm_server", "GlobalRequestLoadBalancer.add_servers", ("servers",)),
    Seam(
        "verl.workers.rollout.llm_server",
        "GlobalRequestLoadBalancer.remove_servers",
        ("server_ids",),
    ),
    Seam("verl.checkpoint_engine", "CheckpointEngineRegistry"),
    Seam("verl.checkpoint_engine.base", "CheckpointEngineRegistry.new"),
    Seam(
        "verl.checkpoint_engine.base", "CheckpointEngineManager.update_weights", ("global_steps",)
    ),
    # separate_async: pools of its own, replicas in bundles that the adapter names.
    Seam(
        "verl.single_controller.ray.base",
        "RayResourcePool.get_placement_groups",
        ("self", "strategy", "name", "device_name"),
    ),
    Seam(
        "verl.single_controller.ray.base",
        "SubRayResourcePool",
        ("self", "placement_groups", "start_bundle_index", "subgroup_world_size"),
    ),
    Seam("verl.workers.rollout.replica", "RolloutReplica.get_ray_class_with_init_args", ("self",)),
    Seam("verl.single_controller.ray.base", "get_master_addr_port"),
    Seam("verl.single_controller.ray.base", "RayClassWithInitArgs.update_options", ("options",)),
    Seam(
        "verl.single_controller.ray.base",
        "RayClassWithInitArgs.__call__",
        ("placement_group", "placement_group_bundle_idx", "use_gpu", "num_gpus", "device_name"),
    ),
    Seam("verl.workers.rollout.replica", "RolloutReplica.init_standalone", ("self",)),
    Seam("verl.workers.rollout.replica", "RolloutReplica.abort_all_requests", ("self",)),
    Seam("verl.experimental.separation.engine_workers", "DetachActorWorker.save_model_to_cpu"),
    Seam("verl.checkpoint_engine.base", "CheckpointEngineWorker"),
    Seam("verl.utils.import_utils", "import_external_libs"),
    # What the conformance harness starts, and where it lets the trainer stand.
    Seam("verl.trainer.constants_ppo", "get_ppo_ray_runtime_env", ("config",)),
    Seam("verl.trainer.ppo.v1", "AgentLoopManagerTQ"),
    Seam(_TRAINER, "PPOTrainer._setup", ("self",)),
    Seam(_TRAINER, "PPOTrainer._submit_batch_to_rollout", ("self", "batch")),
    Seam(_TRAINER, "PPOTrainer._update_actor"),
    Seam(_TRAINER, "PPOTrainer._update_critic"),
    Seam(_TRAINER, "PPOTrainer._compute_ref_log_prob"),
)
