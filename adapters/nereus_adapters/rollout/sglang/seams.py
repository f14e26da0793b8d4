"""Names in SGLang that the adapter stands on."""

from __future__ import annotations

from nereus_core.declaration import Seam

_ENGINE = "sglang.srt.entrypoints.engine"
_IO = "sglang.srt.managers.io_struct"
_MANAGER = "sglang.srt.managers.tokenizer_manager"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
SEAMS = (
    Seam(
        _ENGINE,
        "Engine._launch_scheduler_processes",
        ("server_args", "port_args", "run_scheduler_process_func"),
    ),
    Seam(
        _ENGINE,
        "Engine._launch_detokenizer_subprocesses",
        ("server_args", "port_args", "run_detokenizer_process_func"),
    ),
    Seam(_ENGINE, "Engine.run_scheduler_process_func"),
    Seam(_ENGINE, "Engine.get_all_child_pids", ("self",)),
    Seam(
        _ENGINE,
        "Engine.async_generate",
        ("sampling_params", "input_ids", "return_logprob", "stream", "rid"),
    ),
    Seam("sglang.srt.managers.scheduler", "run_scheduler_process"),
    Seam(_MANAGER, "TokenizerManager.abort_request", ("rid", "abort_all")),
    Seam(_CONTROL, "TokenizerControlMixin.flush_cache"),
    Seam(_CONTROL, "TokenizerControlMixin.get_loads"),
    Seam(_CONTROL, "TokenizerControlMixin.begin_weight_update", ("obj",)),
    Seam(_CONTROL, "TokenizerControlMixin.end_weight_update", ("obj",)),
    Seam(_CONTROL, "TokenizerControlMixin.update_weights_from_tensor", ("obj",)),
    Seam(_CONTROL, "TokenizerControlMixin.update_weights_from_distributed", ("obj",)),
    Seam(_CONTROL, "TokenizerControlMixin.init_weights_update_group", ("obj",)),
    Seam(_CONTROL, "TokenizerControlMixin.destroy_weights_update_group", ("obj",)),
    *(
        Seam(_IO, name)
        for name in (
            "BeginWeightUpdateReqInput",
            "DestroyWeightsUpdateGroupReqInput",
            "EndWeightUpdateReqInput",
            "InitWeightsUpdateGroupReqInput",
            "UpdateWeightsFromDistributedReqInput",
            "UpdateWeightsFromTensorReqInput",
        )
    ),
    Seam(
        _UPDATER,
        "WeightUpdater.update_weights_from_tensor",
        ("self", "named_tensors", "load_format"),
    ),
    Seam(_UPDATER, "WeightUpdater.load_weights_from_distributed", ("self", "named_tensors")),
    Seam(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry.register",
        ("target", "hook", "hook_type"),
    ),
    Seam("sglang.srt.plugins.hook_registry", "HookRegistry.apply_hooks"),
    Seam("sglang.srt.plugins.hook_registry", "HookType"),
    Seam("sglang.srt.runtime_context", "get_parallel"),
    Seam("sglang.srt.utils.common", "MultiprocessingSerializer"),
    Seam("sglang.srt.models.registry", "ModelRegistry"),
)
