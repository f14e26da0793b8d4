"""engine: what differs from verl's FSDPEngine where units have pipeline stages; mixed in before it.

With one stage everything is the engine's that comes next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from verl.utils import tensordict_utils as tu
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.fsdp import transformer_impl as verl_fsdp

from nereus_adapters.verl.pipeline import STAGES_FIELD, STAGES_KEY, stages_at_start
from nereus_adapters.verl.pipeline.batch import Computed, run
from nereus_adapters.verl.pipeline.link import Link
from nereus_adapters.verl.pipeline.stages import FEATURE, keep, layer_of_each, num_layers
from nereus_core.errors import Unsupported
from nereus_core.layout import layer_ranges

PIPELINE = "pp"
"""Name of the dimension of the engine's mesh along which ranks hold the stages of a copy."""


class Pipelined:
    """A rank is one of those that hold a stage between them; ``stages`` stages make a copy."""

    stages: int
    stage: int
    """This rank's."""
    layers: Mapping[str, int]
    """With which each parameter of the whole model lies, by name."""
    num_layers: int
    """1 where the model can have no stages."""
    unpipelined: str | None
    """Why it can have none."""
    return_group: Any = None
    """Process group of the same ranks as the mesh's ``pp``; gradients come back in it."""
    _link: Link
    _whole: Mapping[str, torch.Tensor]
    """Of the whole model, empty tensors, by name."""

    def _init_stages(self: Any, world: int, degree: int) -> tuple[int, int, int]:
        """Return (copies, stages, tensor-parallel ranks); ``degree`` ranks hold a copy."""
        role = _role(self)
        configured = getattr(self.engine_config, STAGES_FIELD, None)
        self.stages = int(configured or stages_at_start(os.environ.get(STAGES_KEY), role))
        if world == 1:  # a new process, until it joins the others
            self.stages = 1
        if degree % self.stages:
            raise Unsupported(
                FEATURE,
                f"the {role}'s units have {degree} ranks (fsdp_size), and {self.stages} stages "
                "(nereus.backend.pipeline_stages) do not divide them",
            )
        copies, tp = world // degree, degree // self.stages
        self.stage = dist.get_rank() % degree // tp
        if self.stages > 1:
            ranks = torch.arange(world).view(copies, self.stages, tp)
            lines = ranks.permute(0, 2, 1).reshape(-1, self.stages).tolist()
            self.return_group = dist.new_subgroups_by_enumeration(lines)[0]
        return copies, self.stages, tp

    def _place(self: Any, module: nn.Module) -> None:
        """Say where each parameter lies, and cut a module to this rank's stage."""
        try:
            self.layers, self.num_layers = layer_of_each(module), num_layers(module)
            self.unpipelined = self._unpipelined(module)
        except Unsupported as error:
            self.layers, self.num_layers, self.unpipelined = {}, 1, error.reason
        if self.stages == 1:
            return
        problem = self.unpipelined
        if problem is None and self.stages > self.num_layers:
            problem = f"{self.stages} stages of {self.num_layers} layers"
        if problem is not None:
            key = "nereus.backend.pipeline_stages"
            raise Unsupported(FEATURE, f"of the {_role(self)} ({key}): {problem}")
        self._whole = {name: p.detach().to("meta") for name, p in module.named_parameters()}
        precision = self.engine_config.mixed_precision or {}
        config: Any = module.config
        self._link = Link(
            self._line,
            self.return_group,
            int(config.get_text_config().hidden_size),
            PrecisionType.to_dtype(precision.get("param_dtype", "bf16")),
            verl_fsdp.get_device_id(),
        )
        keep(module, layer_ranges(self.num_layers, self.stages)[self.stage], self._link)

    @property
    def _line(self: Any) -> Any:
        """Process group of the ranks with this one's place in every stage of its copy."""
        return self.device_mesh[PIPELINE].get_group()

    def _unpipelined(self: Any, module: nn.Module) -> str | None:
        """Say which of the job's options stands against stages."""
        precision, saves = self.engine_config.mixed_precision or {}, self.checkpoint_config
        if PrecisionType.to_dtype(precision.get("param_dtype", "bf16")) == torch.float16:
            return "fp16 scales the loss, and each stage would scale by itself"
        if "hf_model" in saves.save_contents:
            return "checkpoint.save_contents has hf_model, which one stage has not all of"
        if "optimizer" in saves.save_contents and "model" not in saves.save_contents:
            return "checkpoint.save_contents has optimizer without model, which says whose it is"
        if [*verl_fsdp.convert_weight_keys(module.state_dict(), module)] != [*self.layers]:
            return "verl gives its parameters other names for rollouts"
        return None

    def is_mp_src_rank_with_outputs(self: Any) -> bool:
        """Whether this rank answers for its unit."""
        return bool(super().is_mp_src_rank_with_outputs()) and self.stage == self.stages - 1  # type: ignore[misc]

    # --- A batch ------------------------------------------------------------------------------

    def forward_backward_batch(
        self: Any, data: Any, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """Run a batch, micro-batches through the stages one after the other.

        Source of what a batch is told, and of what comes of it: FSDPEngine.forward_backward_batch.
        """
        if self.stages == 1:
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        group = self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(verl_fsdp.get_device_id())
        dist.all_reduce(tokens, group=group)
        tu.assign_non_tensor(
            data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size()
        )
        keeps = tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        micro_batches, indices = verl_fsdp.prepare_micro_batches(
            data=data, dp_group=group, same_micro_num_in_dp=True
        )
        passes = _Passes(self, loss_function, len(micro_batches), forward_only=forward_only)
        with torch.no_grad() if forward_only else nullcontext():
            outputs = run(
                self._link, self.stage, self.stages, micro_batches, passes,
                forward_only=forward_only,
            )  # fmt: skip
        for output in outputs:
            if not forward_only and not keeps:
                output.pop("model_output", None)
        return verl_fsdp.postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def optimizer_step(self: Any) -> Any:
        """Take a step; gradients are clipped by their norm over all stages."""
        if self.stages == 1:
            return super().optimizer_step()  # type: ignore[misc]
        once, verl_fsdp.fsdp2_clip_grad_norm_ = verl_fsdp.fsdp2_clip_grad_norm_, self._clip
        try:
            return super().optimizer_step()  # type: ignore[misc]
        finally:
            verl_fsdp.fsdp2_clip_grad_norm_ = once

    def _clip(self: Any, parameters: Iterator[nn.Parameter], max_norm: float) -> torch.Tensor:
        own = list(parameters)
        found = get_total_norm([p.grad for p in own if p.grad is not None])
        found = found.to(verl_fsdp.get_device_id())
        if isinstance(found, DTensor):
            found = found.full_tensor()
        square = found.double().square()  # of a norm that float32 holds, and its square may not
        dist.all_reduce(square, group=self._line)
        norm = square.sqrt().to(found.dtype)
        clip_grads_with_norm_(own, max_norm, norm)
        return norm

    # --- Weights for rollouts -----------------------------------------------------------------

    def get_per_tensor_param(self: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Yield every tensor of the model on every rank, as verl's engines do."""
        found, adapter = super().get_per_tensor_param(**kwargs)  # type: ignore[misc]
        return (found if self.stages == 1 else self._of_all_stages(found)), adapter

    def _of_all_stages(
        self: Any, own: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        runs = layer_ranges(self.num_layers, self.stages)
        device = verl_fsdp.get_device_id()
        own = iter(own)
        for name, layer in self.layers.items():
            stage = next(index for index, run in enumerate(runs) if layer in run)
            if stage == self.stage:
                tensor = next(own)[1].contiguous()  # in the same order: `_unpipelined`
            else:
                tensor = torch.empty_like(self._whole[name], device=device)
            dist.broadcast(tensor, group=self._line, group_src=stage)
            yield name, tensor


def _role(engine: Any) -> str:
    """Return the role of an engine, which verl does not tell it."""
    if engine.model_type == "value_model":
        return "critic"
    return "ref" if engine.engine_config.forward_only else "actor"


class _Passes:
    """A stage's passes over one batch."""

    def __init__(
        self, engine: Any, loss: Callable[..., Any], micro_batches: int, *, forward_only: bool
    ) -> None:
        self._engine, self._loss, self._last = engine, loss, micro_batches - 1
        self._forward_only = forward_only

    def finish(self, micro_batch: Any) -> Computed:
        """Compute outputs and loss, as verl's engine does."""
        found: Computed = self._engine.forward_step(
            micro_batch, loss_function=self._loss, forward_only=self._forward_only
        )
        return found

    def pass_on(self, micro_batch: Any) -> None:
        """Compute what leaves this stage."""
        engine, dtype = self._engine, self._engine._autocast_dtype
        inputs, _ = engine.prepare_model_inputs(
            micro_batch=micro_batch.to(verl_fsdp.get_device_id())
        )
        computes = torch.autocast(device_type=verl_fsdp.get_device_name(), dtype=dtype)
        with nullcontext() if dtype == torch.float32 else computes:
            engine.module(**inputs, use_cache=False)

    @contextmanager
    def backward_of(self, index: int) -> Iterator[None]:
        """Let FSDP add gradients up, and reduce them with the last micro-batch.

        It keeps order of passes by itself, in which no other micro-batch comes between; told that
        others follow, it leaves that order alone.
        """
        engine, is_last = self._engine, index == self._last
        engine.module.set_is_last_backward(is_last)
        try:
            with engine._gradient_sync_context(is_last_micro_batch=is_last):
                yield
        finally:
            engine.module.set_is_last_backward(True)
