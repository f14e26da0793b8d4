"""Behind: what the conformance harness does in ranks' and engines' own processes.

Nothing here goes through the adapter: state is gathered by DeepSpeed's own means, bytes are counted
where they lie, an engine's weights are read from the modules that it computes with.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_adapters.openrlhf.ranks import engine_of
from nereus_adapters.ray_calls import ask
from nereus_core.errors import WaitTimeout

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's slice of a logical tensor."""

    values: NDArray[Any]
    """bfloat16 as its 16-bit pattern."""
    dim: int | None
    """Cut by tensor parallelism; None where every rank has all of it."""


def bits(tensor: Any) -> NDArray[Any]:
    """Copy a tensor; bfloat16 as its 16-bit pattern."""
    import torch

    data = tensor.detach().contiguous().cpu()
    whole = data.dtype != torch.bfloat16
    found: NDArray[Any] = data.float().numpy() if whole else data.view(torch.int16).numpy()
    return found.copy() if whole else found.view(np.uint16).copy()


# --- Ranks of groups ------------------------------------------------------------------------------


def settle(actor: Any) -> None:
    """Give a fresh group's optimizer the moments that its first step would create."""
    from nereus_adapters.openrlhf.zero import fragments

    for _ in fragments(actor, engine_of(actor), fresh=True):
        pass


def parts_of(actor: Any, trained: bool) -> dict[str, Part]:
    """Return ``slot/tensor`` of a rank, each whole but for the cut of AutoTP.

    Args:
        actor: OpenRLHF's actor.
        trained: Parameters are fp32 masters, and there are moments. Collective over the group then:
            ZeRO shares them out. Else parameters are what the model computes with.
    """
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = engine_of(actor)
    tp = actor.strategy.ds_tensor_parallel_size
    found = {}
    for name, param in engine.module.named_parameters():
        meta = getattr(param, DS_AUTOTP_UC_META, None) or {}
        dim = None if tp == 1 or meta.get("replicated") else meta.get("partition_dim")
        whole = safe_get_full_fp32_param(param) if trained else param
        found[f"param/{name}"] = Part(bits(whole), dim)
        for slot in _MOMENTS if trained else ():
            whole = safe_get_full_optimizer_state(param, slot)
            found[f"{slot}/{name}"] = Part(bits(whole), dim)
    return found


def disturbed(actor: Any, slot: str, name: str) -> None:
    """Add one to what a rank keeps of a moment."""
    from nereus_adapters.openrlhf.zero import SLOTS, fragments

    for extent, tensors in fragments(actor, engine_of(actor)):
        if extent.name == name:
            tensors[SLOTS.index(slot)].data.add_(1)


def state_bytes(actor: Any) -> int:
    """Count the bytes of a rank's weights, masters and moments, once per storage.

    A rank that has left its group should hold none: there, every tensor that Python knows counts.
    """
    if not any(hasattr(actor, name) for name in ("actor", "critic", "model")):
        return _bytes_of(_every_tensor())
    engine = engine_of(actor)
    tensors = list(engine.module.parameters())
    inner: Any = getattr(getattr(engine, "optimizer", None), "optimizer", None)
    if hasattr(inner, "state"):  # a model that is not trained has a dummy of DeepSpeed's
        tensors += [p for group in inner.param_groups for p in group["params"]]
        tensors += [state[slot] for state in inner.state.values() for slot in _MOMENTS]
    return _bytes_of(tensors)


def _bytes_of(tensors: Sequence[Any]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _every_tensor() -> list[Any]:
    import torch

    # by type alone: isinstance asks proxies for what they stand for, and that imports modules
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


# --- Engines --------------------------------------------------------------------------------------


def ask_workers(engine: Any, function: Callable[[Any], Any], timeout_s: float) -> list[Any]:
    """Run a function in every worker of an engine.

    OpenRLHF's engine actor has no call for it, and a function that runs in an asynchronous actor
    cannot wait: one call starts it on the actor's loop, others ask whether it has ended.
    """
    awaited, deadline_s = f"{function.__name__} of an engine", time.monotonic() + timeout_s
    ask([engine], _begin, function, awaited=awaited, timeout_s=timeout_s)
    while time.monotonic() < deadline_s:
        (found,) = ask([engine], _end, awaited=awaited, timeout_s=timeout_s)
        if found is not None:
            return list(found)
        time.sleep(0.005)
    raise WaitTimeout(awaited, timeout_s)


def _begin(actor: Any, function: Callable[[Any], Any]) -> None:
    loop = actor.llm.output_handler.get_loop()
    asked = actor.llm.collective_rpc(function)
    actor.nereus_asked = asyncio.run_coroutine_threadsafe(asked, loop)


def _end(actor: Any) -> Any:
    asked = actor.nereus_asked
    return asked.result() if asked.done() else None


def worker_bytes(worker: Any) -> int:
    """Count the bytes of the weights in a worker."""
    return sum(p.nbytes for p in worker.model_runner.model.parameters())


def worker_parts(worker: Any) -> bytes:
    """Take a worker's Qwen2 apart into slices of the checkpoint's tensors; pickled.

    vLLM's own encoding knows neither arrays nor classes of ours.
    """
    held = _held(worker.model_runner.model)
    return pickle.dumps({f"param/{name}": Part(bits(t), dim) for name, t, dim in held})


def _held(causal: Any) -> Iterator[tuple[str, Any, int | None]]:
    model = causal.model
    for name, layer in (("model.embed_tokens", model.embed_tokens), ("lm_head", causal.lm_head)):
        shard = layer.shard_indices  # without the padding of the vocabulary
        rows = shard.org_vocab_end_index - shard.org_vocab_start_index
        yield f"{name}.weight", layer.weight[:rows], 0
    yield "model.norm.weight", model.norm.weight, None
    for index, layer in enumerate(model.layers):
        at, attention, mlp = f"model.layers.{index}", layer.self_attn, layer.mlp
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        for kind in ("weight", "bias"):
            for one, tensor in zip(
                "qkv", getattr(attention.qkv_proj, kind).split(sizes), strict=True
            ):
                yield f"{at}.self_attn.{one}_proj.{kind}", tensor, 0
        yield f"{at}.self_attn.o_proj.weight", attention.o_proj.weight, 1
        for one, tensor in zip(("gate", "up"), mlp.gate_up_proj.weight.chunk(2), strict=True):
            yield f"{at}.mlp.{one}_proj.weight", tensor, 0
        yield f"{at}.mlp.down_proj.weight", mlp.down_proj.weight, 1
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", getattr(layer, norm).weight, None


# --- Putting together -----------------------------------------------------------------------------


def put_together(ranks: Sequence[Mapping[str, Part]]) -> dict[str, NDArray[Any]]:
    """Lay the slices of a unit's tensor-parallel ranks side by side.

    Raises:
        AssertionError: ranks differ in what each of them has whole.
    """
    whole = {}
    for key, first in ranks[0].items():
        parts = [rank[key] for rank in ranks]
        if first.dim is not None:
            whole[key] = np.concatenate([part.values for part in parts], axis=first.dim)
            continue
        for number, part in enumerate(parts):
            if part.values.tobytes() != first.values.tobytes():
                raise AssertionError(f"{key}: local rank {number} differs from local rank 0")
        whole[key] = first.values
    return whole
