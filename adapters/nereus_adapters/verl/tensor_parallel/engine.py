"""engine: verl's FSDP2 engine, with ranks that hold one copy between them by tensor parallelism.

``fsdp_size`` says how many ranks those are, as it does for the shard groups of verl's own engine,
those of all pipeline stages (`nereus_adapters.verl.pipeline`) together; copies are replicas (HSDP
with a shard of one rank). All else is verl's: optimizer, schedule, clipping, checkpoints, weight
synchronization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from verl.utils.fsdp_utils import fsdp2_load_full_state_dict
from verl.workers.engine.fsdp import transformer_impl as verl_fsdp

from nereus_adapters.verl.cuts import Cut
from nereus_adapters.verl.pipeline.engine import PIPELINE, Pipelined
from nereus_adapters.verl.pipeline.loading import load_stage
from nereus_adapters.verl.tensor_parallel import TENSOR_PARALLEL, VENDOR
from nereus_adapters.verl.tensor_parallel.plan import FEATURE, cuts_of, require_divides, shares_of
from nereus_adapters.verl.tensor_parallel.styles import share_out
from nereus_core.errors import Unsupported


class TensorParallel:
    """What differs from verl's FSDPEngine; mixed in before it."""

    vendor = VENDOR
    device_mesh: Any
    """Dimensions ``ddp`` (copies), ``fsdp`` (of one rank), ``pp`` where there are stages, and
    ``tp``."""
    cuts: Mapping[str, Cut]
    """Of each parameter of the whole model, among the ranks of ``tp``."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the same."""

    def _init_device_mesh(self: Any) -> None:
        self._refuse()
        world, degree = dist.get_world_size(), int(self.engine_config.fsdp_size)
        if degree < 0 or degree > world:
            degree = world
        if world % degree:
            raise Unsupported(FEATURE, f"fsdp_size={degree} does not divide {world} ranks")
        copies, stages, tp = self._init_stages(world, degree)
        sizes = {"ddp": copies, "fsdp": 1, PIPELINE: stages, TENSOR_PARALLEL: tp}
        if stages == 1:
            del sizes[PIPELINE]
        self.device_mesh = init_device_mesh(
            verl_fsdp.device_name, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        self.ulysses_device_mesh = self.ulysses_parallel_group = None
        self.ulysses_sequence_parallel_size, self.use_ulysses_sp = 1, False

    def _refuse(self: Any) -> None:
        """Say by name what of verl's options reaches into parameters past their modules."""
        model, engine = self.model_config, self.engine_config
        options = {
            f"ulysses_sequence_parallel_size={engine.ulysses_sequence_parallel_size}": (
                engine.ulysses_sequence_parallel_size > 1
            ),
            f"lora_rank={model.lora_rank}": model.lora_rank > 0,
            "use_liger": model.use_liger,
            "use_fused_kernels": model.use_fused_kernels,
            "enable_activation_offload": model.enable_activation_offload,
            "qat": bool(getattr(getattr(engine, "qat", None), "enable", False)),
        }
        for option, is_on in options.items():
            if is_on:
                raise Unsupported(FEATURE, f"it does not go together with {option}")

    def _build_fsdp_module(self: Any, module: nn.Module) -> Any:
        """Wrap a module as verl's own engine does with fsdp2, cut by tensor parallelism before."""
        tp, dp = self.device_mesh[TENSOR_PARALLEL], self.device_mesh["ddp", "fsdp"]
        shares, whole_mesh = shares_of(module), self.device_mesh
        require_divides(module, shares, tp.size())
        cuts = cuts_of(module, shares)
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self._place(module)
        self.cuts = {n: replace(cut, layer=self.layers.get(n, 0)) for n, cut in cuts.items()}
        named = module.named_parameters(remove_duplicate=False)  # those that are tied too
        here = {name.rpartition(".")[0] for name, _ in named}
        shares = {name: share for name, share in shares.items() if name in here}
        apply_fsdp2, load = verl_fsdp.apply_fsdp2, verl_fsdp.fsdp2_load_full_state_dict

        def cut_first(model: nn.Module, fsdp_kwargs: dict[str, Any], config: Any) -> None:
            share_out(model, tp, shares)
            apply_fsdp2(model, fsdp_kwargs | {"mesh": dp}, config)

        def load_own(model: nn.Module, files: Any, device_mesh: Any, cpu_offload: Any) -> None:
            device, offload = verl_fsdp.get_device_id(), cpu_offload is not None
            load_stage(model, files, tp.get_group(), device, offload=offload)

        verl_fsdp.apply_fsdp2, self.device_mesh = cut_first, dp
        if self.stages > 1 and load is fsdp2_load_full_state_dict:
            # verl's sends every tensor to all ranks; what fills engines live asks none.
            verl_fsdp.fsdp2_load_full_state_dict = load_own
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]  # verl's engine's
        finally:
            verl_fsdp.apply_fsdp2, self.device_mesh = apply_fsdp2, whole_mesh
            verl_fsdp.fsdp2_load_full_state_dict = load

    def is_mp_src_rank_with_outputs(self: Any) -> bool:
        """Whether this rank answers for its unit, all of whose ranks compute the same outputs."""
        return bool(self.device_mesh[TENSOR_PARALLEL].get_local_rank() == 0)

    def get_data_parallel_rank(self: Any) -> int:
        """Number of the unit, whose ranks all get the same sequences."""
        return int(self.device_mesh["ddp"].get_local_rank())

    def get_data_parallel_size(self: Any) -> int:
        """Number of units."""
        return int(self.device_mesh["ddp"].size())

    def get_data_parallel_group(self: Any) -> Any:
        """Ranks with the same place in their units."""
        return self.device_mesh["ddp"].get_group()


_LMHead: Any = verl_fsdp.FSDPEngineWithLMHead
_ValueHead: Any = verl_fsdp.FSDPEngineWithValueHead


class TensorParallelWithLMHead(Pipelined, TensorParallel, _LMHead):  # type: ignore[misc]  # known at run time only
    """Actor and reference."""

    model_type = "language_model"


class TensorParallelWithValueHead(Pipelined, TensorParallel, _ValueHead):  # type: ignore[misc]
    """Critic."""

    model_type = "value_model"
