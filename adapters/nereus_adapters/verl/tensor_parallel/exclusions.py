"""exclusions: what no rank of a unit could compute rightly, though the model's plan is known.

All of it would train on without an error, and wrongly or in vain, so it is looked for before a
model is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Of configurations of transformers 5.9 with experts."""


def exclusions(model: nn.Module, cut: Collection[str], whole: Collection[str]) -> Iterator[str]:
    """Say what of a model stands against sharing it.

    Args:
        model: A Hugging Face model.
        cut: Names of modules whose inputs or outputs are cut, by columns or rows.
        whole: Names of modules with parameters of which the plan says nothing.
    """
    config: Any = model.config
    text = config.get_text_config()
    yield from _experts(model, text)
    yield from _amid(cut, whole)
    yield from _dropouts(model, text.to_dict())


def _amid(cut: Collection[str], whole: Collection[str]) -> Iterator[str]:
    """Name modules inside blocks that cut.

    What comes to them may be a rank's own part, so that their gradients would be sums over parts
    that nobody adds up.
    """
    blocks = {_block(name) for name in cut}
    for name in whole:
        if block := next((one for one in blocks if f"{name}.".startswith(f"{one}.")), None):
            yield f"the plan does not say how {name} is shared, inside {block}, which is cut"


def _block(name: str) -> str:
    """Return the block of its layer that a module belongs to, e.g. ``model.layers.0.mlp``."""
    parts = name.split(".")
    layer = next((n for n, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: min(layer + 2, len(parts) - 1)])


def _experts(model: nn.Module, text: Any) -> Iterator[str]:
    """Name experts: where the plan says nothing of them, every rank would hold all."""
    for key in _EXPERTS:
        number = getattr(text, key, None)
        if isinstance(number, list | tuple) or (isinstance(number, int) and number > 1):
            yield f"it has experts, {key}={number}"
            return
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        for last, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 2:
                yield f"{name}.{last} has {parameter.dim()} dimensions, as experts have"
                return


def _dropouts(model: nn.Module, text: Mapping[str, Any]) -> Iterator[str]:
    """Name dropout of what all ranks hold alike: each would draw masks of its own.

    In attention each rank has heads of its own, so there masks may differ.
    """
    for key, value in text.items():
        # A classifier's is a module, where there is one.
        of_head = "classifier" in key
        if "drop" in key and not (of_head or _of_attention(key)) and _probability(value) > 0:
            yield f"{key}={value} would drop other numbers on each rank; set it to 0"
    for name, module in model.named_modules():
        of_attention = _of_attention(name.rpartition(".")[2])
        if isinstance(module, nn.Dropout) and module.p > 0 and not of_attention:
            yield f"{name} would drop other numbers on each rank (p={module.p})"


def _of_attention(name: str) -> bool:
    return name.startswith(("attn", "attention"))


def _probability(value: Any) -> float:
    try:
        return 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):  # no number
        return 0.0
