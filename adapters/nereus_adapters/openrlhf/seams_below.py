"""Names of what OpenRLHF itself stands on - Ray, DeepSpeed, vLLM - that are promised to nobody.

Most are private; the others are places that the adapter changes. All are checked by ``ast`` before
Ray starts, as OpenRLHF's own are in `seams.py`: a version that OpenRLHF allows and that lacks one
would else show in the middle of a job.
"""

from __future__ import annotations

from dataclasses import replace

from nereus_core.declaration import Seam

_RAY_STATE = "ray._private.state"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_INIT = "deepspeed.runtime.zero.partition_parameters"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"
_ZERO3 = "deepspeed.runtime.zero.stage3"
_FRAGMENT = "deepspeed.utils.tensor_fragment"

RAY = (
    # Code that runs in any actor, with any number of results: ray_calls.py.
    Seam("ray.actor", "_modify_class.Class.__ray_call__", ("self", "fn")),
    Seam("ray.actor", "ActorMethod.options"),
    # What waits behind the call that an actor is in: the plugin's ending.py.
    Seam("ray.actor", "_modify_class.Class.__ray_ready__", ("self",)),
    # The class behind an actor class, which is what travels: the launcher, warm.py.
    Seam("ray.actor", "ActorClass.__ray_metadata__"),
    Seam("ray.actor", "_ActorClassMetadata.modified_class"),
    # By which the driver's group is known after its ranks have gone: directory.py.
    Seam("ray.actor", "ActorHandle._actor_id"),
    # The actor behind a queue: ending.py ends it, and with it the wait of whoever waits there.
    Seam("ray.util.queue", "Queue.actor"),
    # What is free by node, and which nodes drain: ray_bundles.py, supply.py.
    Seam(_RAY_STATE, "available_resources_per_node", ()),
    Seam(_RAY_STATE, "state"),
    Seam(_RAY_STATE, "GlobalState.get_draining_nodes", ("self",)),
)

DEEPSPEED = (
    # Groups and AutoTP degrees that it keeps through the life of a process: ranks.py.
    Seam("deepspeed.comm.comm", "cdb"),
    Seam("deepspeed.module_inject", "set_autotp_mode", ("training",)),
    Seam("deepspeed.runtime.tensor_parallel.init_utils", "_TP_MODEL_INIT_ARGS"),
    Seam(_OFFLOAD, "DeepSpeedZeRoOffload._register_deepspeed_module", ("self", "module", "count")),
    Seam(_OFFLOAD, "FWD_MODULE_STACK"),
    Seam(_INIT, "Init.param_id"),
    Seam(_INIT, "Init.num_persisted_parameters"),
    Seam(_INIT, "Init.num_persisted_elements"),
    Seam(_INIT, "Init.num_module_parameters"),
    Seam(_INIT, "Init.num_module_elements"),
    # Masters and moments as views of its buffers: zero.py.
    Seam("deepspeed.checkpoint.constants", "DS_AUTOTP_UC_META"),
    Seam(_FRAGMENT, "tensor_fragment.lp_fragment_address"),
    Seam(_FRAGMENT, "tensor_fragment.get_hp_fragment", ("self", "optim_state_key")),
    Seam(_ZERO12, "DeepSpeedZeroOptimizer._hp_optimizer_states_linked"),
    Seam(_ZERO12, "DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state", ("self",)),
    Seam(_ZERO12, "DeepSpeedZeroOptimizer.update_lp_params", ("self",)),
    Seam(_ZERO3, "DeepSpeedZeroOptimizer_Stage3.fp32_partitioned_groups_flat"),
    Seam(_ZERO3, "DeepSpeedZeroOptimizer_Stage3.persistent_parameters"),
    Seam(
        _ZERO3,
        "DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition",
        ("self", "param", "release_swap_buffers", "optim_state_key"),
    ),
    Seam(
        _ZERO3,
        "DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters",
        ("self", "sub_group_id"),
    ),
    Seam("deepspeed.runtime.engine", "DeepSpeedEngine.micro_steps"),
    Seam("deepspeed.runtime.engine", "DeepSpeedEngine.global_steps"),
    Seam("deepspeed.runtime.engine", "DeepSpeedEngine.global_samples"),
    Seam("deepspeed.runtime.engine", "DeepSpeedEngine.skipped_steps"),
    Seam("transformers.integrations.deepspeed", "unset_hf_deepspeed_config", ()),
)

VLLM = (
    # How its engine core is started: forking.py.
    Seam("vllm.v1.engine.utils", "get_mp_context"),
    Seam("vllm.platforms", "current_platform"),
)

SEAMS_BELOW = (*RAY, *(replace(seam, to_change=True) for seam in (*DEEPSPEED, *VLLM)))
