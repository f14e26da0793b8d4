"""stages: with which layer each part of a Hugging Face model lies, and a model cut to one stage.

The layers of other stages stay in their places as modules without parameters, so that the model's
own forward runs as it is, masks and rotary embeddings included, and names stay what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nereus_adapters.verl.pipeline.link import Link
from nereus_adapters.verl.tensor_parallel.plan import tied
from nereus_core.errors import Unsupported

FEATURE = "pipeline stages in training"


def layer_of_each(model: nn.Module) -> dict[str, int]:
    """Return the layer in whose stage each parameter lies, by name, in the model's own order.

    The embedding lies with the first layer, the last norm and the head with the last.

    Source of what lies between them: ``base_model_pp_plan``, which transformers ships with the
    architecture.

    Raises:
        Unsupported: it has no such plan, or parts that go with none.
    """
    kind, base, config = type(model).__name__, _base(model), _text_config(model)
    plan = getattr(config, "base_model_pp_plan", None)
    layers = getattr(base, "layers", None)
    if not plan or not isinstance(layers, nn.ModuleList) or len(layers) != num_layers(model):
        raise Unsupported(FEATURE, f"transformers has no pipeline plan for {kind}")
    if groups := tied(model):
        raise Unsupported(
            FEATURE,
            f"{kind}: {groups[0][0]} and {groups[0][1]} are one and the same "
            "(tie_word_embeddings), and lie in its first and its last stage",
        )
    prefix = f"{model.base_model_prefix}."
    found = {}
    for name, _ in model.named_parameters():
        inside = name.removeprefix(prefix) if name.startswith(prefix) else None
        found[name] = _layer(kind, name, inside, plan, len(layers))
    if extra := sorted(set(model.state_dict()) - set(found)):
        raise Unsupported(FEATURE, f"{kind}: {extra[0]} is state that is no parameter")
    return found


def _layer(
    kind: str, name: str, inside: str | None, plan: Mapping[str, Any], num_layers: int
) -> int:
    """Return the layer with which a parameter lies; ``inside`` is its name in the base model."""
    if inside is None:  # a head
        return num_layers - 1
    part, _, rest = inside.partition(".")
    if part == "layers":
        return int(rest.partition(".")[0])
    goes_in = plan[part][0] if part in plan else ()
    if "input_ids" in goes_in:
        return 0
    if "hidden_states" in goes_in:
        return num_layers - 1
    raise Unsupported(FEATURE, f"{kind}: its pipeline plan does not say where {name} lies")


def num_layers(model: nn.Module) -> int:
    """Return how many layers a model has."""
    return int(_text_config(model).num_hidden_layers)


def keep(model: nn.Module, layers: range, link: Link) -> None:
    """Cut a model to one stage, in place.

    Args:
        model: Of which `layer_of_each` says where its parts lie.
        layers: Of the stage.
        link: To the stages before and after.
    """
    lies, last = layer_of_each(model), num_layers(model) - 1
    layer_names = [f"{model.base_model_prefix}.layers.{index}" for index in range(last + 1)]
    around = {
        owner: layer
        for name, layer in lies.items()
        if not (owner := name.rpartition(".")[0]).startswith(f"{model.base_model_prefix}.layers.")
    }
    for owner, layer in around.items():
        if layer not in layers:
            model.set_submodule(owner, Entry(link) if layer == 0 else Skipped())
    for layer, name in enumerate(layer_names):
        if layer in layers:
            continue
        stub = Before(link) if layer < layers.start else After(link)
        # Some models ask their layers which mask they want.
        if (attention := getattr(model.get_submodule(name), "attention_type", None)) is not None:
            stub.attention_type = attention
        model.set_submodule(name, stub)


class Entry(nn.Module):  # type: ignore[misc]  # torch is known at run time only
    """In place of the embedding: awaits what the stage before has made of the same tokens."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the activations that came."""
        return self._link.receive(tokens.shape)


class Before(nn.Module):  # type: ignore[misc]
    """In place of a layer of a stage before."""

    attention_type: Any

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what came, whatever a model has made of it since (Gemma scales embeddings)."""
        came: Any = self._link.came
        return came


class After(nn.Module):  # type: ignore[misc]
    """In place of a layer of a stage after."""

    attention_type: Any

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Note what leaves this stage."""
        self._link.leaves = hidden_states
        return hidden_states


class Skipped(nn.Module):  # type: ignore[misc]
    """In place of what comes after the layers."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what comes in; nobody reads it."""
        return hidden_states


def _base(model: Any) -> Any:
    return model.base_model


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config()
