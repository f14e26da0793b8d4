"""plan: how each module of a Hugging Face model is shared out, from the model's own plan.

The plan is the one that transformers ships with the architecture (``base_model_tp_plan`` of its
configuration and ``_tp_plan`` of its head). A style that is not known here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from torch import nn

from nereus_core.errors import Unsupported

FEATURE = "tensor parallelism in training"


class Share(Enum):
    """How the ranks of a unit share a module's parameters."""

    COLUMN = "column"
    """Rows of the weight (outputs) are cut; what comes out is cut too."""
    ROW = "row"
    """Columns of the weight (inputs) are cut; what comes out is added up."""
    HEAD = "head"
    """As COLUMN, and what comes out is gathered."""
    VOCABULARY = "vocabulary"
    """Rows of an embedding are cut; what comes out is added up."""
    WHOLE = "whole"
    """Every rank holds all of it and computes the same with it."""
    PER_HEAD = "per head"
    """Every rank holds all of it and computes with its own attention heads; gradients add up."""


_KNOWN = {
    "colwise": Share.COLUMN,
    "rowwise": Share.ROW,
    "colwise_rep": Share.HEAD,  # transformers 4's name
    "colwise_gather_output": Share.HEAD,
    "replicated_with_grad_allreduce": Share.PER_HEAD,
}
"""Source: transformers.integrations.tensor_parallel.ALL_PARALLEL_STYLES."""


def shares(model: nn.Module, degree: int) -> dict[str, Share]:
    """Say how ``degree`` ranks share each module that has parameters of its own.

    Raises:
        Unsupported: the model has no plan, one that is not known, or shapes that do not divide.
    """
    own: dict[str, str] = getattr(model, "tp_plan", None) or {}
    kind = type(model).__name__
    if not any(_KNOWN.get(style) is Share.ROW for style in own.values()):
        raise Unsupported(FEATURE, f"transformers has no tensor-parallel plan for {kind}")
    config: Any = model.config
    if problems := [*head_problems(config.get_text_config().to_dict(), degree)]:
        raise Unsupported(FEATURE, f"{kind}: {'; '.join(problems)}")
    found = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        style = _style(own, name)
        if style is not None and style not in _KNOWN:
            raise Unsupported(FEATURE, f"{kind}: {name} is to be shared as {style!r}")
        found[name] = _share(module, Share.WHOLE if style is None else _KNOWN[style], degree)
        if found[name] in (Share.COLUMN, Share.ROW):
            _require_even(kind, name, module, found[name], degree)
    return found


def head_problems(hf_config: dict[str, Any], degree: int) -> Iterator[str]:
    """Say which numbers of a model ``degree`` does not divide."""
    heads = int(hf_config["num_attention_heads"])
    numbers = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(hf_config.get("num_key_value_heads") or heads),
        "intermediate_size": int(hf_config["intermediate_size"]),
    }
    for key, number in numbers.items():
        if number % degree:
            yield f"tp={degree} does not divide {key}={number}"


def _style(own: dict[str, str], name: str) -> str | None:
    for pattern, style in own.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def _share(module: nn.Module, asked: Share, degree: int) -> Share:
    """Cut a vocabulary where that is even; a subclass may do more than look up rows."""
    weight: Any = getattr(module, "weight", None)
    if type(module) is nn.Embedding and asked is Share.WHOLE:
        return Share.WHOLE if weight.shape[0] % degree else Share.VOCABULARY
    if asked is Share.HEAD and weight.shape[0] % degree:
        return Share.WHOLE
    return asked


def _require_even(kind: str, name: str, module: nn.Module, share: Share, degree: int) -> None:
    if not isinstance(module, nn.Linear):
        raise Unsupported(FEATURE, f"{kind}: {name} is a {type(module).__name__}, not Linear")
    extent = module.out_features if share is Share.COLUMN else module.in_features
    if extent % degree:
        raise Unsupported(FEATURE, f"{kind}: tp={degree} does not divide {extent} of {name}")
