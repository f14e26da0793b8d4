"""Reading a rank's boxes from a Hugging Face folder, and making such folders."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nereus_adapters.torch.engine.families import norm_start
from nereus_adapters.torch.engine.initial import initial_tensor
from nereus_core.errors import ModelConfigError, NereusError
from nereus_core.model import ModelSpec
from nereus_core.state import Box, Shard, tensor_rules

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Of all families' configurations; used where config.json does not say.
DEFAULT_STD = 0.02


class Folder:
    """The safetensors files of a checkpoint folder; reads parts of tensors only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if (path / INDEX).exists():
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            self._files: dict[str, str] = index["weight_map"]
        elif (path / SINGLE).exists():
            with safe_open(path / SINGLE, "pt") as opened:
                self._files = dict.fromkeys(opened.keys(), SINGLE)
        else:
            raise NereusError(f"{path} holds neither {SINGLE} nor {INDEX}; see export_model.")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, shard: Shard, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return this shard's boxes on the CPU.

        A ``score.weight`` (a critic's head) that the folder does not have is zero: a critic made
        from a language model starts by predicting nothing.

        Raises:
            ModelConfigError: a tensor is missing or has another shape.
        """
        by_file: dict[str, list[str]] = {}
        found: dict[str, torch.Tensor] = {}
        for name, box in shard.items():
            if name in self:
                by_file.setdefault(self._files[name], []).append(name)
            elif name == "score.weight":
                found[name] = torch.zeros(box.shape, dtype=dtype)
            else:
                raise ModelConfigError(name, f"no such tensor in {self.path}")
        for file, names in by_file.items():
            with safe_open(self.path / file, "pt") as opened:
                for name in names:
                    found[name] = _read_box(opened.get_slice(name), name, shard[name], dtype)
        return found


def _read_box(stored: Any, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
    shape = tuple(stored.get_shape())
    if len(shape) != len(box.shape) or any(end > n for end, n in zip(box.end, shape, strict=True)):
        raise ModelConfigError(name, f"stored with shape {shape}, box ends at {box.end}")
    where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
    part: torch.Tensor = stored[where]
    # A clone even without a cast: a view would keep the whole mapped tensor alive.
    return part.to(dtype).clone(memory_format=torch.contiguous_format)


def export_model(source: Path | Mapping[str, Any], folder: Path, *, seed: int = 0) -> Path:
    """Make a folder with config.json, float32 safetensors and, where there is one, a tokenizer.

    Does nothing when the folder is there already; otherwise it appears at once and complete.

    Args:
        source: a Hugging Face folder, a ``.gguf`` file (needs the packages gguf and accelerate),
            or the values of a config.json for a model with random weights.
        folder: to be made.
        seed: of random weights.

    Returns:
        The folder.
    """
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        if isinstance(source, Mapping):
            _write_random(source, temporary, seed)
        else:
            _convert(source, temporary)
        os.replace(temporary, folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_random(config: Mapping[str, Any], folder: Path, seed: int) -> None:
    model = ModelSpec.from_hf_config(config)
    std = float(config.get("initializer_range", DEFAULT_STD))
    norm = norm_start(model.family)
    tensors = {
        rule.name: initial_tensor(rule.name, rule.shape, seed, std, norm)
        for rule in tensor_rules(model)
    }
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")


def _convert(source: Path, folder: Path) -> None:
    where: dict[str, Any] = {}
    if source.suffix == ".gguf":
        source, where = source.parent, {"gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **where)
    config = loaded.config.to_dict()
    # Of the file that was read, and its path: the weights are plain now, and here.
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model, state = ModelSpec.from_hf_config(config), loaded.state_dict()
    tensors = {rule.name: state[rule.name].contiguous() for rule in tensor_rules(model)}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    except (OSError, ValueError):
        return  # a model without a tokenizer is a complete one here
    tokenizer.save_pretrained(folder)
