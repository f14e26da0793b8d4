"""Zero: a rank's part of DeepSpeed's optimizer state, as views of its own storage.

ZeRO-1 and -2 link each parameter to its interval of the rank's flat fp32 buffer (`_hp_mapping`);
ZeRO-3 keeps an interval of every parameter (`ds_tensor`) one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nereus_adapters.openrlhf.extents import Extent
from nereus_core.errors import PrimitiveError

SLOTS = ("param", "exp_avg", "exp_avg_sq")
_MOMENTS = SLOTS[1:]
_COUNTERS = ("global_steps", "skipped_steps", "global_samples")
Fragment = tuple[Extent, tuple[Any, ...]]
"""An extent, and its fp32 master and moments as views of the flat buffers."""


def fragments(actor: Any, engine: Any, *, fresh: bool = False) -> Iterator[Fragment]:
    """Yield what this rank holds of every trained parameter, in the model's order.

    Args:
        actor: OpenRLHF's actor, for its device mesh.
        engine: Its DeepSpeed engine.
        fresh: The optimizer has never stepped: its moments are created first, as zeros.
    """
    optimizer = engine.optimizer
    if fresh:
        _create_moments(optimizer)
    if is_zero3(optimizer):
        yield from _of_zero3(engine)
        return
    _link(optimizer)
    tp_rank, tp = rank_of_slice(actor), actor.strategy.ds_tensor_parallel_size
    for name, param in engine.module.named_parameters():
        mapping = getattr(param, "_hp_mapping", None)
        if not param.requires_grad or mapping is None:
            continue
        address = mapping.lp_fragment_address
        extent = _sliced(name, param, tp_rank, tp, address.start, address.start + address.numel)
        states = tuple(mapping.get_hp_fragment(key) for key in _MOMENTS)
        yield extent, (mapping.get_hp_fragment(), *states)


def is_zero3(optimizer: Any) -> bool:
    """Whether parameters themselves are partitioned."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def rank_of_slice(actor: Any) -> int:
    """Return the tensor-parallel rank of a rank."""
    return int(actor.strategy.ds_device_mesh["tp"].get_local_rank())


def _of_zero3(engine: Any) -> Iterator[Fragment]:
    import torch.distributed as dist

    optimizer = engine.optimizer
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        width, whole = param.ds_tensor.numel(), param.ds_numel
        start = min(dist.get_rank(param.ds_process_group) * width, whole)
        stop = min(start + width, whole)
        tensors = tuple(
            optimizer._get_fp32_opt_state_partition(param, False, key)[0][: stop - start]
            for key in (None, *_MOMENTS)
        )
        if stop > start:
            yield Extent(name, tuple(param.ds_shape), None, 0, 1, start, stop), tensors


def _sliced(name: str, param: Any, tp_rank: int, tp: int, start: int, stop: int) -> Extent:
    """Say which slice of a whole parameter AutoTP gave this rank."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    meta = getattr(param, DS_AUTOTP_UC_META, None) or {}
    dim = None if meta.get("replicated") else meta.get("partition_dim")
    if tp == 1 or dim is None:
        return Extent(name, tuple(param.shape), None, 0, 1, start, stop)
    if meta.get("sub_param_sizes") or meta.get("sub_param_shard_widths"):
        raise PrimitiveError(
            f"{name} is a fused parameter that AutoTP cuts in parts; Nereus cannot move it."
        )
    mine = param.shape[dim]
    sizes = meta.get("partition_sizes") or (mine,) * tp
    shape = (*param.shape[:dim], sum(sizes), *param.shape[dim + 1 :])
    if sizes[tp_rank] != mine:
        raise PrimitiveError(
            f"{name} has {mine} of {sum(sizes)} along dimension {dim} on rank {tp_rank} of {tp}; "
            f"AutoTP says {sizes[tp_rank]}."
        )
    return Extent(name, shape, dim, sum(sizes[:tp_rank]), mine, start, stop)


def _create_moments(optimizer: Any) -> None:
    """Give a fresh Adam the state it would create in its first step."""
    import torch

    inner = optimizer.optimizer
    # ZeRO-3 gives its inner optimizer parameters only while it steps.
    flats = (
        optimizer.fp32_partitioned_groups_flat
        if is_zero3(optimizer)
        else [flat for group in inner.param_groups for flat in group["params"]]
    )
    for flat in flats:
        state = inner.state[flat]
        for key in _MOMENTS:
            state.setdefault(key, torch.zeros_like(flat.data))
        # torch counts in a tensor, DeepSpeed's own optimizers in a number
        counted = isinstance(inner, torch.optim.AdamW)
        state.setdefault("step", torch.tensor(0.0) if counted else 0)


def _link(optimizer: Any) -> None:
    """Link moments to parameters.

    DeepSpeed does it once, after the first parameter group stepped for the first time: the moments
    of OpenRLHF's second group (biases and norms) were not there yet, and stay unlinked.
    """
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def refresh_weights(engine: Any) -> None:
    """Round the masters into the weights that the model computes with, as a step does."""
    optimizer = engine.optimizer
    if not is_zero3(optimizer):
        optimizer.update_lp_params()
        return
    for number in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    if persistent := optimizer.persistent_parameters:  # small ones, which every rank keeps whole
        persistent[0].all_gather(persistent)


def counters_of(engine: Any) -> dict[str, Any]:
    """Return what a group counts.

    Raises:
        PrimitiveError: gradients have been accumulated and not been used.
    """
    accumulation = engine.gradient_accumulation_steps()
    if engine.micro_steps % accumulation:
        raise PrimitiveError(
            f"{engine.micro_steps} micro steps are no multiple of {accumulation}: gradients are "
            "in flight, and no layout can be changed."
        )
    inner = engine.optimizer.optimizer
    steps = [s["step"] for s in inner.state.values() if "step" in s]
    steps += [g["step"] for g in inner.param_groups if "step" in g]
    return {
        "step": float(steps[0]) if steps else 0.0,
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None,
        "lrs": [group["lr"] for group in inner.param_groups],
        **{name: getattr(engine, name) for name in _COUNTERS},
    }


def put_counters(engine: Any, counters: Mapping[str, Any]) -> None:
    """Let a new engine count on from where the old one was."""
    import torch

    inner, step = engine.optimizer.optimizer, counters["step"]
    for state in inner.state.values():
        state["step"] = torch.tensor(step) if torch.is_tensor(state["step"]) else int(step)
    for group, lr in zip(inner.param_groups, counters["lrs"], strict=True):
        group["lr"] = lr
        if "step" in group:
            group["step"] = int(step)
    if counters["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(counters["scheduler"])
    for name in _COUNTERS:
        setattr(engine, name, counters[name])
    # An optimizer step falls due when micro_steps + 1 is a multiple of the accumulation, which
    # another number of ranks changes: copied, it would let gradients of two batches mix.
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def counters_inside(actor: Any) -> dict[str, Any]:
    """Return what the group of a rank counts."""
    from nereus_adapters.openrlhf.ranks import engine_of

    return counters_of(engine_of(actor))
