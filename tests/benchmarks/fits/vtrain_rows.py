"""vTrain's measured GPT training plans as counts of the core's own cost model.

Source: VIA-Research/vTrain, MIT license: ground_truth_{multi,single}.csv, iteration time of
Megatron-LM on A100 nodes of eight, by tensor, data and pipeline parallelism and micro-batch.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from nereus_core.cluster import Cluster
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import FloatArray
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.cost.training import Passes
from nereus_core.device_specs import A100_SXM_80, INFINIBAND_HDR, NVLINK3
from nereus_core.model import ModelSpec
from nereus_core.workload import ACTOR_TRAIN, BFLOAT16_MIXED, Job, grpo

NODE = 8
"""Devices of a node."""
# Links of other names than those whose curves were measured elsewhere: these are fitted.
CLUSTER = Cluster.homogeneous(
    1,
    NODE,
    A100_SXM_80,
    replace(NVLINK3, name="vtrain-intra"),
    replace(INFINIBAND_HDR, name="vtrain-inter"),
)
"""Only its rates are used: a row says itself which groups cross nodes."""
_VOCAB = 51200
"""GPT-2's 50,257 tokens as Megatron-LM pads them."""
_COLUMNS = {
    "devices": "# GPUs",
    "batch": "global batch",
    "micro": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "tokens": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
    "ms": "iteration time (ms)",
}


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Measured plans: columns of the file by short name, and their counts."""

    columns: dict[str, FloatArray]
    passes: Passes

    def __len__(self) -> int:
        return len(self.columns["ms"])

    @property
    def seconds(self) -> FloatArray:
        """Measured iteration time."""
        return self.columns["ms"] / 1e3

    def at(self, rows: FloatArray) -> Self:
        """Some of the rows."""
        return type(self)({k: v[rows] for k, v in self.columns.items()}, self.passes.rows(rows))

    def plan(self, row: int) -> str:
        """A row in words."""
        c = {k: f"{v[row]:g}" for k, v in self.columns.items()}
        return (
            f"h{c['hidden']} L{c['layers']} batch {c['batch']} micro {c['micro']} "
            f"tp{c['tp']} pp{c['pp']} dp{c['dp']}"
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of the published form; a row needs every column but may come in any order.

        Raises:
            FileNotFoundError: there is no such file, or it has no rows.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path} is absent; expected vTrain's measured plans")
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = [{k.strip(): v for k, v in row.items()} for row in csv.DictReader(file)]
        if not found:
            raise FileNotFoundError(f"{path} holds no rows")
        columns = {k: np.array([float(r[name]) for r in found]) for k, name in _COLUMNS.items()}
        passes = [_passes({k: int(v[i]) for k, v in columns.items()}) for i in range(len(found))]
        return cls(columns, Passes.joined(passes))


def _passes(row: dict[str, int]) -> Passes:
    """Counts of one row: Megatron-LM lays out tp innermost, then dp, then pp."""
    h, tp, pp, dp = row["hidden"], row["tp"], row["pp"], row["dp"]
    # GPT's MLP has two matrices of 4h; three of 8h/3 hold as many elements.
    model = ModelSpec(
        "gpt", "gpt", row["layers"], h, 8 * h // 3, row["heads"], row["heads"],
        h // row["heads"], _VOCAB, tied_embeddings=True,
    )  # fmt: skip
    models = {"actor": model, "ref": model}
    job = Job(
        grpo(), models, CLUSTER, row["batch"], row["tokens"], 1, BFLOAT16_MIXED, row["micro"],
        recompute="full",
    )  # fmt: skip
    one, yes = np.ones(1, dtype=np.int64), np.ones(1, dtype=np.bool_)
    options = Options(
        tp * one, pp * one, dp * one,
        yes & (tp > NODE), yes & (tp * dp * pp > NODE), yes & (tp * dp > NODE),
        dp_rails=one * min(dp, max(1, NODE // tp)),
    )  # fmt: skip
    # All sequences have one length; a sequence is prompt and response, so split it in two.
    half = row["tokens"] / 2
    shapes = RankShapes.of(model, options)
    return Passes.of(job, ACTOR_TRAIN, options, shapes, Lengths(half, half, half, half))
