"""Names in vLLM that the adapter stands on."""

from __future__ import annotations

from nereus_core.declaration import Seam

_ASYNC = "vllm.v1.engine.async_llm"
_TRANSFER = "vllm.distributed.weight_transfer"
SEAMS = (
    Seam("vllm", "SamplingParams"),
    Seam("vllm.sampling_params", "RequestOutputKind"),
    Seam("vllm.engine.arg_utils", "EngineArgs"),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.from_engine_args",
        ("engine_args", "stat_loggers"),
    ),
    Seam("vllm.v1.engine.llm_engine", "LLMEngine.add_request", ("request_id", "prompt", "params")),
    Seam("vllm.v1.engine.llm_engine", "LLMEngine.abort_request", ("request_ids",)),
    Seam("vllm.v1.engine.llm_engine", "LLMEngine.step", ()),
    Seam("vllm.v1.engine.llm_engine", "LLMEngine.set_weight_version"),
    Seam("vllm.engine.arg_utils", "AsyncEngineArgs"),
    Seam("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    Seam(_ASYNC, "AsyncLLM.from_vllm_config", ("vllm_config", "stat_loggers")),
    Seam(_ASYNC, "AsyncLLM.add_request", ("request_id", "prompt", "params")),
    Seam(_ASYNC, "AsyncLLM.abort", ("request_id",)),
    Seam(_ASYNC, "AsyncLLM.collective_rpc", ("method", "args")),
    Seam(_ASYNC, "AsyncLLM.errored"),
    Seam(_ASYNC, "AsyncLLM.reset_prefix_cache"),
    Seam(_ASYNC, "AsyncLLM.shutdown", ("timeout",)),
    Seam(_ASYNC, "AsyncLLM.update_weight_version", ("new_version",)),
    Seam("vllm.v1.engine.exceptions", "EngineDeadError"),
    Seam(
        "vllm.v1.metrics.loggers", "StatLoggerBase.record", ("scheduler_stats", "iteration_stats")
    ),
    Seam(
        "vllm.v1.executor.abstract",
        "Executor.collective_rpc",
        ("method", "timeout", "args", "kwargs", "non_block"),
    ),
    Seam("vllm.v1.executor.abstract", "Executor.execute_model", ("scheduler_output", "non_block")),
    Seam("vllm.v1.executor.abstract", "Executor.sample_tokens", ("grammar_output", "non_block")),
    Seam("vllm.utils.import_utils", "resolve_obj_by_qualname"),
    Seam("vllm.v1.serial_utils", "run_method"),
    Seam("vllm.v1.worker.worker_base", "WorkerWrapperBase", ("rpc_rank", "global_rank")),
    Seam("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", ("all_kwargs",)),
    Seam("vllm.v1.worker.gpu_worker", "Worker.start_weight_update"),
    Seam("vllm.v1.worker.gpu_worker", "Worker.update_weights", ("update_info",)),
    Seam("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update"),
    Seam("vllm.platforms", "current_platform"),
    Seam("vllm.distributed.parallel_state", "cleanup_dist_env_and_memory"),
    Seam("vllm.distributed.parallel_state", "get_pp_group"),
    Seam("vllm.distributed.parallel_state", "get_tp_group"),
    Seam(f"{_TRANSFER}.base", "WeightTransferEngine", ("config", "vllm_config", "device", "model")),
    Seam(f"{_TRANSFER}.base", "WeightTransferInitInfo"),
    Seam(f"{_TRANSFER}.base", "WeightTransferUpdateInfo"),
    Seam(f"{_TRANSFER}.factory", "WeightTransferEngineFactory.register_engine", ("name",)),
    Seam(f"{_TRANSFER}.factory", "WeightTransferEngineFactory._registry"),
    Seam("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead"),
    Seam("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload", ("model",)),
    Seam("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload"),
    Seam("vllm.model_executor.model_loader.reload.layerwise", "LAYERWISE_INFO"),
)
