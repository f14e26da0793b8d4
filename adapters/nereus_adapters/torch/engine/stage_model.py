"""StageModel: the modules of one rank of a unit, under the logical names of the state map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nereus_adapters.torch.engine.families import (
    attention_windows,
    family,
    full_config,
    rank_config,
    widen_norms,
)
from nereus_adapters.torch.engine.groups import UnitGroups
from nereus_adapters.torch.engine.tensor_parallel import (
    VocabEmbedding,
    copy_to_region,
    reduce_from_region,
)
from nereus_core.errors import ModelConfigError
from nereus_core.layout import Layout, layer_ranges
from nereus_core.model import ModelSpec
from nereus_core.state import unit_shards


class StageModel(nn.Module):
    """A pipeline stage of a decoder, cut for one tensor-parallel rank; built without storage.

    Decoder layers, norms and rotary embedding are Hugging Face's own modules with this rank's
    number of heads and columns; all-reduces hang around attention and MLP as hooks.
    ``named_parameters`` yields exactly the names of `state.unit_shards`.
    """

    def __init__(
        self,
        model: ModelSpec,
        hf_config: Mapping[str, Any],
        layout: Layout,
        local_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.layout, self.dtype, self.device = model, layout, dtype, device
        pp_rank, tp_rank = divmod(local_rank, layout.tp)
        self.is_first, self.is_last = pp_rank == 0, pp_rank == layout.pp - 1
        self.groups = UnitGroups.single()
        shard = unit_shards(model, layout)[local_rank]
        layers = layer_ranges(model.num_layers, layout.pp)[pp_rank]
        whole = full_config(hf_config)
        local = rank_config(whole, model, layout, layers)
        classes = family(model.family, model.hidden)
        self._cache_argument = classes.cache_argument
        self._embedding_scale = classes.embedding_scale
        self._windows = attention_windows(whole, layers)

        self.model = nn.Module()
        with torch.device("meta"):
            rows = -(-model.vocab // layout.tp)
            self.vocab_start = tp_rank * rows
            self.vocab_rows = min(rows, model.vocab - self.vocab_start)
            if "model.embed_tokens.weight" in shard:
                self.model.embed_tokens = VocabEmbedding(
                    self.vocab_rows, model.hidden, self.vocab_start
                )
            self.model.layers = nn.ModuleDict(
                {str(i): classes.layer(local, n) for n, i in enumerate(layers)}
            )
            if self.is_last:
                self.model.norm = classes.norm(model.hidden, eps=local.rms_norm_eps)
            if "lm_head.weight" in shard:
                self.lm_head = nn.Linear(model.hidden, self.vocab_rows, bias=False)
            if "score.weight" in shard:
                self.score = nn.Linear(model.hidden, 1, bias=False)
        if dtype is torch.float64:
            widen_norms(self, model.family, classes.norm)
        self.to(dtype=dtype)
        # After the cast: its frequencies stay float32 in every precision, as in Hugging Face.
        self.rotary = classes.rotary(config=local).to(device)
        if layout.tp > 1:
            for layer in self.model.layers.values():
                self._split(layer)
        self.eval()  # there is no dropout to train with; it would depend on the layout
        self._check(shard)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: Any = None,
        visible: torch.Tensor | None = None,
        key_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run this stage's layers.

        Args:
            hidden: int64 tokens [B, Q] on the first stage, else activations [B, Q, hidden].
            positions: int64 [B, Q] or [1, Q], of the queries in their sequences.
            cache: Hugging Face cache of this rank's layers, extended in place; None for none.
            visible: bool [B, K], which keys exist; None means queries are the keys, padded on
                the right only, so that causality alone hides padding.
            key_positions: int64 [B, K]; with ``visible`` only.

        Returns:
            Activations [B, Q, hidden], after the final norm on the last stage.
        """
        if self.is_first:
            hidden = self.model.embed_tokens(hidden, self.groups.tp)
            if self._embedding_scale != 1.0:
                # Rounded to float32, then to the model's type, as in Hugging Face.
                hidden = hidden * torch.tensor(self._embedding_scale).to(hidden.dtype)
        rotary = self.rotary(hidden, position_ids=positions)
        masks = {
            window: _mask(positions, window, visible, key_positions) for window in self._windows
        }
        for layer, window in zip(self.model.layers.values(), self._windows, strict=True):
            hidden = layer(
                hidden,
                attention_mask=masks[window],
                position_ids=positions,
                position_embeddings=rotary,
                use_cache=cache is not None,
                **{self._cache_argument: cache},
            )
        return self.model.norm(hidden) if self.is_last else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project [N, hidden] to this rank's vocabulary rows, at least float32."""
        tied = self.spec.tied_embeddings
        weight = self.model.embed_tokens.weight if tied else self.lm_head.weight
        found = F.linear(copy_to_region(hidden, self.groups.tp), weight)
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project [N, hidden] to one value each, at least float32."""
        found = self.score(hidden)[..., 0]
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def adopt(self, name: str, tensor: torch.Tensor, *, trains: bool) -> None:
        """Make a tensor the storage of a parameter."""
        path, _, leaf = name.rpartition(".")
        setattr(self.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=trains))

    def _split(self, layer: nn.Module) -> None:
        def enter_attention(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            hidden = copy_to_region(kwargs["hidden_states"], self.groups.tp)
            return args, {**kwargs, "hidden_states": hidden}

        def leave_attention(_: nn.Module, __: Any, output: Any) -> Any:
            return reduce_from_region(output[0], self.groups.tp), *output[1:]

        def enter_mlp(_: nn.Module, args: Any) -> Any:
            return (copy_to_region(args[0], self.groups.tp),)

        def leave_mlp(_: nn.Module, __: Any, output: Any) -> Any:
            return reduce_from_region(output, self.groups.tp)

        layer.self_attn.register_forward_pre_hook(enter_attention, with_kwargs=True)
        layer.self_attn.register_forward_hook(leave_attention)
        layer.mlp.register_forward_pre_hook(enter_mlp)
        layer.mlp.register_forward_hook(leave_mlp)

    def _check(self, shard: Mapping[str, Any]) -> None:
        """Refuse a config whose modules have tensors that the state map does not know."""
        mine = {name: tuple(p.shape) for name, p in self.named_parameters()}
        agreed = {name: box.shape for name, box in shard.items()}
        if mine != agreed:
            odd = sorted(set(mine.items()) ^ set(agreed.items()))
            raise ModelConfigError(
                "model_type", f"{self.spec.family} with this config has other tensors: {odd[:4]}"
            )


def _mask(
    positions: torch.Tensor,
    window: int | None,
    visible: torch.Tensor | None,
    key_positions: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return bool [B or 1, 1, Q, K]; None where plain causality does."""
    if visible is None:
        if window is None or positions.shape[-1] <= window:
            return None
        key_positions = positions
    assert key_positions is not None
    back = positions[:, :, None] - key_positions[:, None, :]
    mask = back >= 0
    if window is not None:
        mask = mask & (back < window)
    if visible is not None:
        mask = mask & visible[:, None, :]
    return mask[:, None]
