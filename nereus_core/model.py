"""ModelSpec: the shapes of a decoder-only transformer, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from nereus_core.errors import ModelConfigError

Head = Literal["lm", "value"]
NormStyle = Literal["pre", "sandwich"]

# (qkv bias by default, per-head q/k norm, norms per layer); read from each family's
# configuration_*.py and modeling_*.py in transformers 5.x.
_FAMILIES: dict[str, tuple[bool, bool, NormStyle]] = {
    "llama": (False, False, "pre"),
    "mistral": (False, False, "pre"),
    "qwen2": (True, False, "pre"),
    "qwen3": (False, True, "pre"),
    "gemma": (False, False, "pre"),
    "gemma2": (False, False, "sandwich"),
    "gemma3_text": (False, True, "sandwich"),
}
_TIED_BY_DEFAULT = {"gemma", "gemma2", "gemma3_text"}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of one model. Symbols in formulas: L layers, h hidden, H heads, K kv heads, d head."""

    name: str
    family: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_style: NormStyle = "pre"
    head: Head = "lm"
    """``lm`` predicts tokens; ``value`` has one output per token (a critic)."""

    @classmethod
    def from_hf_config(cls, source: Mapping[str, object] | str | Path, *, name: str = "") -> Self:
        """Read shapes from a config mapping, a ``config.json``, or the folder that holds one.

        Raises:
            ModelConfigError: a field is missing, has the wrong type, or names an unknown family.

        Source: transformers 5.x ``configuration_{llama,qwen2,qwen3,mistral,gemma*}.py``.
        """
        config, label = _load(source)
        family = config.get("model_type")
        if family == "gemma3" and isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]  # type: ignore[assignment]  # narrowed on the line above
            family = "gemma3_text"
        if not isinstance(family, str) or family not in _FAMILIES:
            raise ModelConfigError(
                "model_type", f"{family!r} is unknown; known: {', '.join(sorted(_FAMILIES))}"
            )
        bias, qk_norm, style = _FAMILIES[family]
        heads = _positive_int(config, "num_attention_heads")
        hidden = _positive_int(config, "hidden_size")
        has_head_dim = config.get("head_dim") is not None
        if not has_head_dim and hidden % heads:
            raise ModelConfigError("head_dim", f"absent, and hidden_size {hidden} % {heads} != 0")
        kv_present = config.get("num_key_value_heads") is not None
        kv_heads = _positive_int(config, "num_key_value_heads") if kv_present else heads
        if heads % kv_heads:
            raise ModelConfigError(
                "num_key_value_heads", f"{kv_heads} does not divide {heads} attention heads"
            )
        return cls(
            name=name or label or family,
            family=family,
            num_layers=_positive_int(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_positive_int(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_positive_int(config, "head_dim") if has_head_dim else hidden // heads,
            vocab=_positive_int(config, "vocab_size"),
            tied_embeddings=_flag(config, "tie_word_embeddings", family in _TIED_BY_DEFAULT),
            # Qwen2 has no such field: its q, k and v always carry a bias and o never does.
            qkv_bias=bias or _flag(config, "attention_bias", default=False),
            qk_norm=qk_norm,
            norm_style=style,
        )

    def as_critic(self, name: str) -> Self:
        """Return the same backbone with a value head in place of the LM head."""
        return replace(self, name=name, head="value", tied_embeddings=False)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, tied weights counted once."""
        h, q, kv = self.hidden, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = (2 if self.norm_style == "pre" else 4) * h + (2 * self.head_dim * self.qk_norm)
        # q, o: h*H*d each; k, v: h*K*d each; SwiGLU: three h*intermediate
        layer = 2 * h * q + 2 * h * kv + 3 * h * self.intermediate + norms
        layer += (q + 2 * kv) * self.qkv_bias
        head = h if self.head == "value" else (0 if self.tied_embeddings else self.vocab * h)
        return self.num_layers * layer + self.vocab * h + h + head


def _load(source: Mapping[str, object] | str | Path) -> tuple[Mapping[str, object], str]:
    if isinstance(source, Mapping):
        return source, str(source.get("_name_or_path") or "")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError("config.json", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelConfigError("config.json", f"{path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelConfigError(
            "config.json", f"{path} holds {type(loaded).__name__}, not an object"
        )
    return loaded, path.parent.name


def _positive_int(config: Mapping[str, object], field: str) -> int:
    value = config.get(field)
    if value is None:
        raise ModelConfigError(field, "missing")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelConfigError(field, f"expected a positive integer, got {value!r}")
    return value


def _flag(config: Mapping[str, object], field: str, default: bool) -> bool:
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise ModelConfigError(field, f"expected true or false, got {value!r}")
    return value
