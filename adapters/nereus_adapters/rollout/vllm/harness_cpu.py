"""What the conformance harness needs in vLLM's workers on a CPU; no job with accelerators uses it.

vLLM 0.32 allocates the buffer in which a pipeline stage receives in a profiling run, which it
leaves out on a CPU without compilation: pipelines then fail at the first batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from nereus_adapters.rollout.assembling import Part
from nereus_adapters.rollout.vllm.extension import Extension


class CpuExtension(Extension):
    """The extension of every worker, and the harness's looks behind it."""

    model_runner: Any

    def nereus_receive_buffer(self) -> None:
        """Allocate the buffer in which this pipeline stage receives."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=torch.device("cpu"),
            )

    def nereus_slow(self, step_s: float) -> None:
        """Let every step take at least as long, until the engine ends."""
        runner = self.model_runner
        step = runner.execute_model

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(step_s)
            return step(*args, **kwargs)

        runner.execute_model = slow

    def nereus_peek(self) -> dict[str, Part]:
        """Return what this rank computes with: ``param/tensor`` -> offset in it, values."""
        with torch.inference_mode():
            return {
                f"param/{name}": (offset, values.numpy().copy())
                for name, offset, values in _held(self.model_runner.get_model())
            }


def _held(causal: Any) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Take a Llama of vLLM apart into parts of the checkpoint's tensors."""
    model, tied, tp_rank = (
        causal.model,
        causal.config.tie_word_embeddings,
        get_tp_group().rank_in_group,
    )
    first, last = get_pp_group().is_first_rank, get_pp_group().is_last_rank
    if first:
        yield "model.embed_tokens.weight", *_rows(model.embed_tokens, model.embed_tokens.weight)
    if last:
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        if not (first and tied):
            yield name, *_rows(causal.lm_head, causal.lm_head.weight)
        yield "model.norm.weight", (0,), model.norm.weight
    for index in range(model.start_layer, model.end_layer):
        at, layer = f"model.layers.{index}", model.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = _matrix(attention.qkv_proj).split(
            [attention.q_size, attention.kv_size, attention.kv_size]
        )
        kv_rank = tp_rank // attention.qkv_proj.num_kv_head_replicas
        yield f"{at}.self_attn.q_proj.weight", (tp_rank * attention.q_size, 0), q
        yield f"{at}.self_attn.k_proj.weight", (kv_rank * attention.kv_size, 0), k
        yield f"{at}.self_attn.v_proj.weight", (kv_rank * attention.kv_size, 0), v
        output = _matrix(attention.o_proj)
        yield f"{at}.self_attn.o_proj.weight", (0, tp_rank * output.shape[1]), output
        gate, up = _matrix(mlp.gate_up_proj).chunk(2)
        yield f"{at}.mlp.gate_proj.weight", (tp_rank * gate.shape[0], 0), gate
        yield f"{at}.mlp.up_proj.weight", (tp_rank * up.shape[0], 0), up
        down = _matrix(mlp.down_proj)
        yield f"{at}.mlp.down_proj.weight", (0, tp_rank * down.shape[1]), down
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", (0,), getattr(layer, norm).weight


def _rows(layer: Any, weight: torch.Tensor) -> tuple[tuple[int, int], torch.Tensor]:
    """Return a rank's rows of a vocabulary, without the padding."""
    shard = layer.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    return (start, 0), weight[: end - start]


def _matrix(layer: Any) -> torch.Tensor:
    """Return the matrix that a linear layer multiplies with.

    vLLM's CPU kernels keep it packed and empty the parameter: what the layer makes of the identity
    is the matrix, to the bit, since every sum has one term that is not zero.
    """
    weight: torch.Tensor = layer.weight
    if weight.numel():
        return weight
    identity = torch.eye(layer.input_size_per_partition, dtype=weight.dtype)
    product: torch.Tensor = layer.quant_method.apply(layer, identity, None)
    return product.T.contiguous()
