"""filling: an engine that verl builds is given its state from a rank's own shards.

Runs inside verl's worker processes. Models are built empty, without reading their files, and
nothing is broadcast: each rank copies what it holds into its local shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nereus_adapters.verl.shards import Held, local_box
from nereus_core.errors import StateDiffers
from nereus_core.state import Slot


def take_optimizer(engine: Any, state: Held) -> None:
    """Give an engine its moments, counters, hyper-parameters and schedule."""
    if engine.optimizer is None:
        return
    from torch.distributed.tensor import DTensor

    aside = getattr(engine, "is_optimizer_offload_enabled", False)
    for name, parameter in engine.module.named_parameters():
        slots = {s: t for (s, n), t in state.tensors.items() if n == name and s != Slot.PARAM}
        if not slots:
            continue
        device = torch.device("cpu") if aside else parameter.device
        own: dict[str, Any] = {"step": torch.tensor(state.counters[name], dtype=torch.float32)}
        for slot, tensor in slots.items():
            moved = tensor.to(device, copy=True)
            if isinstance(parameter, DTensor):
                moved = DTensor.from_local(
                    moved,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            own[slot] = moved
        engine.optimizer.state[parameter] = own
    for group, values in zip(engine.optimizer.param_groups, state.extras["groups"], strict=True):
        group.update(values)
    for name in ("lr_scheduler", "scaler"):
        if name in state.extras and getattr(engine, name, None) is not None:
            getattr(engine, name).load_state_dict(state.extras[name])


@contextmanager
def empty_models(state: Held, unit: str) -> Iterator[None]:
    """Let verl build a model without reading its files; load it from a rank's own shards."""
    import verl.utils.model as models
    import verl.workers.engine.fsdp.transformer_impl as engines
    from accelerate import init_empty_weights
    from verl.utils.device import get_device_id

    saved = (
        models.get_hf_auto_model_class,
        models.load_valuehead_model,
        engines.get_init_weight_context_manager,
        engines.fsdp2_load_full_state_dict,
    )

    def from_config(kind: Any, config: Any, dtype: Any, trust: bool) -> Any:
        attention = getattr(config, "_attn_implementation", None) or "sdpa"
        return kind.from_config(
            config, dtype=dtype, trust_remote_code=trust, attn_implementation=attention
        )

    def auto_class(hf_config: Any) -> Any:
        found = saved[0](hf_config=hf_config)

        class Empty:
            @staticmethod
            def from_pretrained(
                pretrained_model_name_or_path: str,
                torch_dtype: Any,
                config: Any,
                trust_remote_code: bool,
            ) -> Any:
                return from_config(found, config, torch_dtype, trust_remote_code)

        return Empty

    def value_head(
        local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from transformers import AutoModelForTokenClassification

        return from_config(
            AutoModelForTokenClassification, model_config, torch_dtype, trust_remote_code
        )

    def init_context(use_meta_tensor: bool = True, mesh: Any = None) -> Any:
        return init_empty_weights if use_meta_tensor else lambda: torch.device("cpu")

    def load(
        module: Any, full_state: Any, device_mesh: Any = None, cpu_offload: Any = None
    ) -> None:
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.to_empty(device=get_device_id())
        take_parameters(module, state, unit)
        if cpu_offload is not None:
            module.to("cpu")
        for name, buffer in module.named_buffers():
            buffer.data = buffers[name].to(get_device_id())

    models.get_hf_auto_model_class, models.load_valuehead_model = auto_class, value_head
    engines.get_init_weight_context_manager = init_context
    engines.fsdp2_load_full_state_dict = load
    try:
        yield
    finally:
        (
            models.get_hf_auto_model_class,
            models.load_valuehead_model,
            engines.get_init_weight_context_manager,
            engines.fsdp2_load_full_state_dict,
        ) = saved


def take_parameters(module: Any, state: Held, unit: str) -> None:
    """Fill a module's local shards; raises StateDiffers where it wants others than are held."""
    names = set()
    for name, parameter in module.named_parameters():
        box, mine = local_box(parameter), state.boxes.get(name)
        if mine is None or (box != mine and box.num_elements + mine.num_elements > 0):
            raise StateDiffers(unit, name, mine, box)
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
        with torch.no_grad():
            local.copy_(state.tensors[Slot.PARAM.value, name])
        names.add(name)
    if extra := sorted(set(state.boxes) - names):
        raise StateDiffers(unit, extra[0], state.boxes[extra[0]], "no such parameter")


def restore_random(state: Held) -> None:
    """Give this process the random state of the rank that it goes on for."""
    torch.set_rng_state(state.extras["rng"])
    if "cuda_rng" in state.extras:
        torch.cuda.set_rng_state(state.extras["cuda_rng"])
