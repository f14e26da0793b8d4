"""engine: verl's FSDP2 engine, with ranks that hold one copy between them by tensor parallelism.

``fsdp_size`` says how many ranks those are, as it does for the shard groups of verl's own engine;
copies are replicas (HSDP with a shard of one rank). All else is verl's: optimizer, schedule,
clipping, checkpoints, weight synchronization.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from verl.workers.engine.fsdp import transformer_impl as verl_fsdp

from nereus_adapters.verl.tensor_parallel.plan import FEATURE, shares
from nereus_adapters.verl.tensor_parallel.styles import share_out
from nereus_core.errors import Unsupported


class TensorParallel:
    """What differs from verl's FSDPEngine; mixed in before it."""

    device_mesh: Any
    """Dimensions ``ddp`` (copies), ``fsdp`` (of one rank) and ``tp``."""

    def _init_device_mesh(self: Any) -> None:
        self._refuse()
        world, degree = dist.get_world_size(), int(self.engine_config.fsdp_size)
        if degree < 0 or degree > world:
            degree = world
        if world % degree:
            raise Unsupported(FEATURE, f"fsdp_size={degree} does not divide {world} ranks")
        self.device_mesh = init_device_mesh(
            verl_fsdp.device_name, (world // degree, 1, degree), mesh_dim_names=("ddp", "fsdp", "tp")
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
            "qat": bool(getattr(getattr(engine, "qat", None), "enable", False)),
        }
        for option, is_on in options.items():
            if is_on:
                raise Unsupported(FEATURE, f"it does not go together with {option}")

    def _build_fsdp_module(self: Any, module: nn.Module) -> Any:
        """Wrap a module as verl's own engine does with fsdp2, cut by tensor parallelism before."""
        tp, dp = self.device_mesh["tp"], self.device_mesh["ddp", "fsdp"]
        cut, apply_fsdp2 = shares(module, tp.size()), verl_fsdp.apply_fsdp2
        original_mesh = self.device_mesh

        def cut_first(model: nn.Module, fsdp_kwargs: dict[str, Any], config: Any) -> None:
            share_out(model, tp, cut)
            apply_fsdp2(model, fsdp_kwargs | {"mesh": dp}, config)

        verl_fsdp.apply_fsdp2, self.device_mesh = cut_first, dp
        try:
            return super()._build_fsdp_module(module)
        finally:
            verl_fsdp.apply_fsdp2, self.device_mesh = apply_fsdp2, original_mesh

    def is_mp_src_rank_with_outputs(self: Any) -> bool:
        return bool(self.device_mesh["tp"].get_local_rank() == 0)

    def get_data_parallel_rank(self: Any) -> int:
        return int(self.device_mesh["ddp"].get_local_rank())

    def get_data_parallel_size(self: Any) -> int:
        return int(self.device_mesh["ddp"].size())

    def get_data_parallel_group(self: Any) -> Any:
        return self.device_mesh["ddp"].get_group()


class TensorParallelWithLMHead(TensorParallel, verl_fsdp.FSDPEngineWithLMHead):
    """Actor and reference."""

    model_type = "language_model"


class TensorParallelWithValueHead(TensorParallel, verl_fsdp.FSDPEngineWithValueHead):
    """Critic."""

    model_type = "value_model"
