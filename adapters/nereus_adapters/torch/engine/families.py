"""What Hugging Face's model families give: layer, norm and rotary classes, and a rank's config."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from nereus_core.errors import ModelConfigError
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec

# model_type -> prefix of its classes in transformers.models.<model_type>.modeling_<model_type>.
_PREFIXES = {
    "gemma": "Gemma",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Classes of one family. ``type[nn.Module]``: transformers is untyped."""

    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]
    cache_argument: str
    """Of the layer's forward; renamed in transformers 5.2x."""
    embedding_scale: float
    """Embeddings are multiplied by it; not so the tied head."""


def family(name: str, hidden: int) -> Family:
    """Import the classes of a family, for a hidden size.

    Raises:
        ModelConfigError: the engine does not know the family.
    """
    if name not in _PREFIXES:
        known = ", ".join(sorted(_PREFIXES))
        raise ModelConfigError("model_type", f"{name!r} does not run here; these do: {known}")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    layer = getattr(module, f"{_PREFIXES[name]}DecoderLayer")
    arguments = inspect.signature(layer.forward).parameters
    return Family(
        layer,
        getattr(module, f"{_PREFIXES[name]}RMSNorm"),
        getattr(module, f"{_PREFIXES[name]}RotaryEmbedding"),
        "cache" if "cache" in arguments else "past_key_values",
        math.sqrt(hidden) if name == "gemma" else 1.0,
    )


def full_config(hf_config: Mapping[str, Any]) -> Any:
    """Build the family's own configuration object from the values of a ``config.json``."""
    return CONFIG_MAPPING[hf_config["model_type"]].from_dict(copy.deepcopy(dict(hf_config)))


def rank_config(config: Any, model: ModelSpec, layout: Layout, layers: range) -> Any:
    """Return the configuration of one rank's part: its heads, columns and layers."""
    local = copy.deepcopy(config)
    # Set first: the families derive it from hidden size and heads where it is absent.
    local.head_dim = model.head_dim
    local.num_attention_heads = model.num_heads // layout.tp
    local.num_key_value_heads = max(1, model.num_kv_heads // layout.tp)
    local.intermediate_size = model.intermediate // layout.tp
    local.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        local.layer_types = [config.layer_types[i] for i in layers]
    local._attn_implementation = "sdpa"
    return local


def attention_windows(config: Any, layers: range) -> list[int | None]:
    """Return per layer how many tokens back it sees; None is all of them."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window for _ in layers]
    return [window if kinds[i] == "sliding_attention" else None for i in layers]


class WideRMSNorm(nn.Module):
    """RMSNorm that stays in float64, where Hugging Face's rounds to float32 in between.

    Rounding there would make a float64 run depend on the layout: an input that differs in its last
    bit may round the other way.
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden] over its last dimension."""
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return (self.offset + self.weight) * (hidden * torch.rsqrt(variance + self.eps))


def norm_start(family_name: str) -> float:
    """Return the weight of a norm that only normalizes; Gemma's norms multiply by 1 + weight."""
    return 0.0 if family_name == "gemma" else 1.0


def widen_norms(module: nn.Module, family_name: str, norm: type[nn.Module]) -> None:
    """Put `WideRMSNorm` in place of every norm below a module."""
    offset = 1.0 - norm_start(family_name)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, norm):
                eps = child.eps if family_name == "gemma" else child.variance_epsilon
                setattr(parent, name, WideRMSNorm(child.weight, eps, offset))
