"""SGLang as a rollout engine. Importing this package imports no sglang; the hooks do when called.

`factory.SglangEngines` makes engines. A `pool.StemPool` keeps one process that has imported sglang
(`stem`) and forks engine processes from it (`host`), whose rank processes are forked in turn: no
engine pays for imports. `engine` is the driver's end of one engine process, `loading` runs inside
its ranks, `groups` brings weights to them from process groups of trainers.
"""

from __future__ import annotations

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

NAME = "sglang"

_TABLE = {
    Stage.GENERATE: full(),
    Stage.TRAIN: unsupported("SGLang generates; training is another adapter's, or the job's own"),
    Stage.INFER: unsupported("SGLang generates; forward passes are another adapter's"),
}
CAPABILITIES = Capabilities(
    split=_TABLE,
    merge=_TABLE,
    extend=_TABLE,
    destroy=_TABLE,
    features={
        **{feature: full() for feature in Feature},
        Feature.FINGERPRINT: unsupported(
            "an engine holds weights in fused form; every cell's digest is checked on arrival"
        ),
        Feature.EFFICIENCY_PROBE: unsupported("tokens per second are measured, classes are not"),
    },
)

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


@hookimpl
def nereus_declare_adapter() -> AdapterDeclaration:
    """Declare the engine without importing it."""
    return AdapterDeclaration(
        NAME,
        "rollout on SGLang engines that start in a second; tp, pp and replica count change",
        CAPABILITIES,
        requirement="sglang>=0.5.23,<0.6",
        install="pip install 'nereus[sglang]'",
        seams=SEAMS,
        tiers=("real",),
    )


@hookimpl
def nereus_create_adapter(name: str, handle: object, config: NereusConfig) -> RolloutAdapter | None:
    """Attach to the generate stage of a running job."""
    if name != NAME:
        return None
    from importlib import metadata

    from nereus_adapters.rollout.adapter import RolloutAdapter
    from nereus_adapters.rollout.job import RolloutJob

    if not isinstance(handle, RolloutJob):
        raise WrongHandle(NAME, handle, "a nereus_adapters.rollout.job.RolloutJob")
    return RolloutAdapter(NAME, CAPABILITIES, handle, metadata.version("sglang"))


@hookimpl(optionalhook=True)
def nereus_conformance_harness(name: str, tier: str) -> RolloutHarness | None:
    """Return the harness of the real tier: SGLang on CPU."""
    if name != NAME or tier != "real":
        return None
    from nereus_adapters.rollout.sglang.harness import new_harness

    return new_harness()
