"""plan: how each module of a Hugging Face model is shared out, from the model's own plan.

The plan is the one that transformers ships with the architecture (``base_model_tp_plan`` of its
configuration and ``_tp_plan`` of its head). A style that is not known here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch import nn

from nereus_adapters.verl.cuts import Cut
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
_DIMS: Mapping[Share, Mapping[str, int]] = {
    Share.COLUMN: {"weight": 0, "bias": 0},
    Share.ROW: {"weight": 1},
    Share.HEAD: {"weight": 0, "bias": 0},
    Share.VOCABULARY: {"weight": 0},
}
"""Dimension that is cut, by name of a parameter in its module; Linear keeps (outputs, inputs)."""


def shares_of(model: nn.Module) -> dict[str, Share]:
    """Say how each module that has parameters of its own is shared, where the degree divides it.

    Raises:
        Unsupported: the model has no plan, or one that is not known.
    """
    kind, layers = type(model).__name__, getattr(model, "tp_plan", None)
    if not layers:
        raise Unsupported(FEATURE, f"transformers has no tensor-parallel plan for {kind}")
    # An instance's plan leaves out what its class says of the head.
    own = {**(getattr(type(model), "_tp_plan", None) or {}), **layers}
    found = {}
    for name, module in model.named_modules():
        style = _style(own, name)
        if style is not None and style not in _KNOWN:
            raise Unsupported(FEATURE, f"{kind}: {name} is to be shared as {style!r}")
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        share = Share.WHOLE if style is None else _KNOWN[style]
        if share in (Share.COLUMN, Share.ROW, Share.HEAD) and not isinstance(module, nn.Linear):
            raise Unsupported(FEATURE, f"{kind}: {name} is a {type(module).__name__}, not Linear")
        # A subclass may do more than look up rows.
        found[name] = Share.VOCABULARY if share is Share.WHOLE and _looks_up(module) else share
    for first, *others in tied(model):
        owners = [name.rpartition(".")[0] for name in (first, *others)]
        if any(found[owner] not in (Share.VOCABULARY, Share.HEAD) for owner in owners):
            found |= dict.fromkeys(owners, Share.WHOLE)
    return found


def require_divides(model: nn.Module, shares: Mapping[str, Share], degree: int) -> None:
    """Raise Unsupported unless every rank gets as many heads and columns as any other."""
    config: Any = model.config
    problems = [*head_problems(config.get_text_config().to_dict(), degree)]
    for name, share in shares.items():
        if share in (Share.COLUMN, Share.ROW):
            weight: Any = model.get_submodule(name).weight
            extent = weight.shape[_DIMS[share]["weight"]]
            if extent % degree:
                problems.append(f"tp={degree} does not divide {extent} of {name}")
    if problems:
        raise Unsupported(FEATURE, f"{type(model).__name__}: {'; '.join(problems)}")


def head_problems(hf_config: Mapping[str, Any], degree: int) -> Iterator[str]:
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


def at(share: Share, module: nn.Module, degree: int) -> Share:
    """Return how so many ranks share a module: a vocabulary that they do not divide is not cut."""
    weight: Any = getattr(module, "weight", None)
    if share in (Share.VOCABULARY, Share.HEAD) and weight.shape[0] % degree:
        return Share.WHOLE
    return share


def cuts_of(model: nn.Module, shares: Mapping[str, Share]) -> dict[str, Cut]:
    """Return how each parameter of a model is cut, by its name."""
    found = {}
    for name, _ in model.named_parameters():
        owner, _, last = name.rpartition(".")
        found[name] = Cut(_DIMS.get(shares[owner], {}).get(last))
    return found


def tied(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one and the same, group by group."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _style(own: Mapping[str, str], name: str) -> str | None:
    for pattern, style in own.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def _looks_up(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None
