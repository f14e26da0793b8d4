"""Inside a rank process: what it holds, for the conformance harness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nereus_adapters.rollout.assembling import Part
from nereus_adapters.rollout.sglang.calls import TIED


def parameter_bytes(model: Any, rank: int, argument: object) -> int:
    """Return the bytes of this rank's parameters, each storage once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def parts(model: Any, rank: int, argument: object) -> dict[str, Part]:
    """Return what this rank computes with: ``param/tensor`` -> offset in it, values."""
    return {
        f"param/{name}": (offset, values.detach().numpy().copy())
        for name, offset, values in _held(model)
    }


def _held(causal: Any) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Take a Llama of SGLang apart into parts of the checkpoint's tensors."""
    from sglang.srt.runtime_context import get_parallel

    parallel, model = get_parallel(), causal.model
    tp_rank = parallel.tp_rank
    tied = causal.config.tie_word_embeddings or getattr(causal.config, TIED, False)
    first, last = parallel.pp_rank == 0, parallel.pp_rank == parallel.pp_size - 1
    if first:
        yield "model.embed_tokens.weight", *_rows(model.embed_tokens)
    if last:
        if not (first and tied):
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            yield name, *_rows(causal.lm_head)
        yield "model.norm.weight", (0,), model.norm.weight
    for index in range(model.start_layer, model.end_layer):
        at, layer = f"model.layers.{index}", model.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.qkv_proj.weight.split(
            [attention.q_size, attention.kv_size, attention.kv_size]
        )
        kv_rank = tp_rank // attention.qkv_proj.num_kv_head_replicas
        yield f"{at}.self_attn.q_proj.weight", (tp_rank * attention.q_size, 0), q
        yield f"{at}.self_attn.k_proj.weight", (kv_rank * attention.kv_size, 0), k
        yield f"{at}.self_attn.v_proj.weight", (kv_rank * attention.kv_size, 0), v
        output = attention.o_proj.weight
        yield f"{at}.self_attn.o_proj.weight", (0, tp_rank * output.shape[1]), output
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        yield f"{at}.mlp.gate_proj.weight", (tp_rank * gate.shape[0], 0), gate
        yield f"{at}.mlp.up_proj.weight", (tp_rank * up.shape[0], 0), up
        down = mlp.down_proj.weight
        yield f"{at}.mlp.down_proj.weight", (0, tp_rank * down.shape[1]), down
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", (0,), getattr(layer, norm).weight


def _rows(layer: Any) -> tuple[tuple[int, int], torch.Tensor]:
    """Return a rank's rows of a vocabulary, without the padding."""
    shard = layer.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    return (start, 0), layer.weight[: end - start]
