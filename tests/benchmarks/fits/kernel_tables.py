"""Kernel tables measured by others, as columns of shapes and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from nereus_core.cluster import DeviceSpec, LinkSpec
from nereus_core.cost.kernels import Collective
from nereus_core.device_specs import A100_SXM_80, H100_SXM, INFINIBAND_HDR, NVLINK3, NVLINK4

SPECS: dict[str, DeviceSpec] = {"a100_sxm": A100_SXM_80, "h100_sxm": H100_SXM}
LINKS: dict[str, LinkSpec] = {"a100_sxm": NVLINK3, "h100_sxm": NVLINK4}
ELEMENT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0}
NCCL_BYTES = 2.0
HEAD_DIM = 128
"""Of every model in serving_dense.csv and of the Llama and Qwen families."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Shapes and seconds of one kernel class on one system; all columns of one length."""

    name: str
    file: str
    columns: dict[str, np.ndarray]
    seconds: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    def rows(self, at: np.ndarray) -> Table:
        """Some of the rows."""
        return Table(
            self.name, self.file, {k: v[at] for k, v in self.columns.items()}, self.seconds[at]
        )


def _file(folder: Path, system: str, kind: str) -> Path | None:
    found = sorted((folder / "aiconfigurator").glob(f"{system}__{kind}.parquet"))
    return found[-1] if found else None


def _table(name: str, path: Path, frame: pd.DataFrame, names: dict[str, str]) -> Table:
    columns = {ours: frame[theirs].to_numpy(float) for ours, theirs in names.items()}
    return Table(name, path.name, columns, frame["latency"].to_numpy(float) / 1e3)


def gemms(folder: Path, system: str) -> Iterator[tuple[str, Table]]:
    """Products by precision: columns m, n, k."""
    path = _file(folder, system, "gemm__*__gemm_perf")
    if path is None:
        return
    frame = pd.read_parquet(path)
    # The fastest kernel of a shape is the one an engine picks.
    for precision, rows in frame.groupby("gemm_dtype"):
        best = rows.groupby(["m", "n", "k"], as_index=False)["latency"].min()
        yield str(precision), _table("gemm", path, best, {"m": "m", "n": "n", "k": "k"})


def attention(folder: Path, system: str, phase: str) -> Table | None:
    """Attention in bfloat16 without windows; columns sequences, tokens, query, kv."""
    path = _file(folder, system, f"attention__*__{phase}_attention_perf")
    if path is None:
        return None
    frame = pd.read_parquet(path)
    frame = frame[(frame["head_dim"] == HEAD_DIM) & (frame["kv_cache_dtype"] == "bfloat16")]
    if "window_size" in frame:
        frame = frame[frame["window_size"] == 0]
    shape = ["batch_size", "isl", "step", "num_heads", "num_key_value_heads"]
    frame = frame.groupby(shape, as_index=False)["latency"].min()
    names = {
        "sequences": "batch_size",
        "tokens": "isl" if phase == "context" else "step",
        "query": "num_heads",
        "kv": "num_key_value_heads",
    }
    table = _table(f"attention_{phase}", path, frame, names)
    table.columns["query"] *= HEAD_DIM
    table.columns["kv"] *= HEAD_DIM
    return table


def nccl(folder: Path, system: str) -> Iterator[tuple[Collective, Table]]:
    """Collectives inside a node; columns ranks, bytes (of the whole tensor)."""
    path = _file(folder, system, "comm__nccl__*__nccl_perf")
    if path is None:
        return
    frame = pd.read_parquet(path)
    frame = frame[frame["nccl_dtype"] == "half"].assign(
        size=lambda f: f["message_size"] * NCCL_BYTES
    )
    for name, rows in frame.groupby("op_name"):
        what = Collective.ALL_TO_ALL if name == "alltoall" else Collective(str(name))
        yield what, _table(what, path, rows, {"ranks": "num_gpus", "bytes": "size"})


def custom_all_reduce(folder: Path, system: str) -> Table | None:
    """The serving engine's own all-reduce in captured graphs; columns ranks, bytes."""
    path = _file(folder, system, "comm__vllm__*__custom_allreduce_perf")
    if path is None:
        return None
    frame = pd.read_parquet(path)
    frame = frame[frame["backend"] == "vllm_graph"].assign(
        size=lambda f: f["message_size"] * NCCL_BYTES
    )
    return _table("custom_all_reduce", path, frame, {"ranks": "num_gpus", "bytes": "size"})


VIDUR_LINKS = {"a100_dgx": (NVLINK3, INFINIBAND_HDR), "h100_dgx": (NVLINK4, None)}


def vidur(folder: Path, system: str, op: str) -> Iterator[tuple[str, LinkSpec, Table]]:
    """Collectives of DGX machines by link: intra, inter (whole nodes), inter_sparse (1-2 GPUs)."""
    path = folder / "vidur" / f"network__{system}__{op}.csv.gz"
    if not path.exists():
        return
    frame = pd.read_csv(path)
    median = f"time_stats.{op}.median"
    # A collective ends when its last rank does.
    frame = frame.groupby(["num_workers", "devices_per_node", "size"], as_index=False)[median].max()
    frame = frame.rename(columns={median: "latency"})
    crosses = frame["num_workers"] > frame["devices_per_node"]
    whole = frame["devices_per_node"] >= 4
    intra, inter = VIDUR_LINKS[system]
    for place, link, rows in (
        ("intra", intra, frame[~crosses]),
        ("inter", inter, frame[crosses & whole]),
        ("inter_sparse", inter, frame[crosses & ~whole]),
    ):
        if link is not None and len(rows):
            names = {"ranks": "num_workers", "bytes": "size"}
            yield place, link, _table(f"{op}_{place}", path, rows, names)
