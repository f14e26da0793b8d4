"""Rows of serving_dense.csv, and how they are split where no test folder is given."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from pathlib import Path

from nereus_core.model import ModelSpec

SPLIT_SEED = "serving-1"
"""Registered before the first fit: a row is held out by the hash of this and its id."""
HELD_OUT = 0.25

MODELS = {
    # Source: config.json of each on Hugging Face.
    "Qwen/Qwen3-32B": ModelSpec(
        "qwen3-32b", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936, qk_norm=True
    ),
    "meta-llama/Llama-3.1-8B-Instruct": ModelSpec(
        "llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ModelSpec(
        "llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256
    ),
    "meta-llama/Llama-3.1-70B": ModelSpec(
        "llama-3.1-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256
    ),
}


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One measured point: ``batch`` requests kept in flight, all of the same lengths."""

    row_id: str
    source: str
    """The measuring campaign: its file, without concurrency and dates."""
    backend: str
    version: str
    model: str
    system: str
    quantization: str
    """Of the products: '' for bfloat16."""
    isl: int
    osl: int
    batch: int
    tp: int
    pp: int
    ttft_s: float
    tpot_s: float

    @property
    def spec(self) -> ModelSpec:
        """Shapes of the model; raises KeyError on one that is not dense Llama or Qwen here."""
        return MODELS[self.model]

    @property
    def order(self) -> int:
        """A number in [0, 2^32) that has nothing to do with the row's values."""
        digest = hashlib.sha256(f"{SPLIT_SEED} {self.row_id}".encode()).digest()
        return int.from_bytes(digest[:4])

    @property
    def held_out(self) -> bool:
        """Whether the internal split tests on it."""
        return self.order < HELD_OUT * 2**32


def read(folder: Path) -> list[ServingRow]:
    """Read FOLDER/aiconfigurator/serving_dense.csv.

    Raises:
        FileNotFoundError: with what to set.
    """
    path = folder / "aiconfigurator" / "serving_dense.csv"
    if not path.exists():
        raise FileNotFoundError(f"no {path}; set NEREUS_DATA to the folder of measured data")
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(raw) for raw in csv.DictReader(file)]


def _row(raw: dict[str, str]) -> ServingRow:
    source = raw["silicon_data_source"].split(";")[0].rpartition("data/")[2]
    return ServingRow(
        raw["id"],
        source.removeprefix("source_file="),
        raw["backend"],
        raw["backend_version"],
        raw["model_path"],
        raw["system"],
        raw["gemm_quant_mode"],
        int(raw["isl"]),
        int(raw["osl"]),
        int(raw["batch_size"]),
        int(raw["tp_size"]),
        int(raw["pp_size"]),
        float(raw["silicon_ttft_ms"]) / 1e3,
        float(raw["silicon_tpot_ms"]) / 1e3,
    )
