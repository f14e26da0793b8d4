"""engine: verl's FSDP2 engine, with ranks that hold one copy between them by tensor parallelism.

``fsdp_size`` says how many ranks those are, as it does for the shard groups of verl's own engine;
copies are replicas (HSDP with a shard of one rank). All else is verl's: optimizer, schedule,
clipping, checkpoints, weight synchronization.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from verl.workers.engine.fsdp import transformer_impl as verl_fsdp

from nereus_adapters.verl.cuts import Cut
from nereus_adapters.verl.tensor_parallel import VENDOR
from nereus_adapters.verl.tensor_parallel.plan import FEATURE, cuts_of, require_divides, shares_of
from nereus_adapters.verl.tensor_parallel.styles import share_out
from nereus_core.errors import Unsupported


class TensorParallel:
    """What differs from verl's FSDPEngine; mixed in before it."""

    vendor = VENDOR
    device_mesh: Any
    """Dimensions ``ddp`` (copies), ``fsdp`` (of one rank) and ``tp``."""
    cuts: Mapping[str, Cut]
    """Of each parameter, among the ranks of ``tp``."""

    def _init_device_mesh(self: Any) -> None:
        self._refuse()
        world, degree = dist.get_world_size(), int(self.engine_config.fsdp_size)
        if degree < 0 or degree > world:
            degree = world
        if world % degree:
            raise Unsupported(FEATURE, f"fsdp_size={degree} does not divide {world} ranks")
        shape, names = (world // degree, 1, degree), ("ddp", "fsdp", "tp")
        self.device_mesh = init_device_mesh(verl_fsdp.device_name, shape, mesh_dim_names=names)
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
        shares, whole_mesh = shares_of(module), self.device_mesh
        require_divides(module, shares, tp.size())
        self.cuts, apply_fsdp2 = cuts_of(module, shares), verl_fsdp.apply_fsdp2

        def cut_first(model: nn.Module, fsdp_kwargs: dict[str, Any], config: Any) -> None:
            share_out(model, tp, shares)
            apply_fsdp2(model, fsdp_kwargs | {"mesh": dp}, config)

        verl_fsdp.apply_fsdp2, self.device_mesh = cut_first, dp
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]  # verl's engine's
        finally:
            verl_fsdp.apply_fsdp2, self.device_mesh = apply_fsdp2, whole_mesh

    def is_mp_src_rank_with_outputs(self: Any) -> bool:
        """Whether this rank answers for its unit, all of whose ranks compute the same outputs."""
        return bool(self.device_mesh["tp"].get_local_rank() == 0)

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


class TensorParallelWithLMHead(TensorParallel, _LMHead):  # type: ignore[misc]  # known at run time only
    """Actor and reference."""

    model_type = "language_model"


class TensorParallelWithValueHead(TensorParallel, _ValueHead):  # type: ignore[misc]
    """Critic."""

    model_type = "value_model"
