"""Peak memory of training, predicted and measured: SimuMax's B200 runs of Llama-3 on Megatron-LM.

Nothing is fitted: peaks are arithmetic on shapes. Reported are the median and the largest error of
the bytes the fullest rank allocated, and, as information, the error of step seconds from the
untouched priors and after one common factor. Runs with context parallelism count as data
parallelism over slices of a sequence; mixtures of experts are beyond the model and only counted.

    python tests/benchmarks/memory_model.py [--json]

Source of the data: MooreThreads/SimuMax (Apache-2.0), 43 runs; sequences of 4,096 tokens and one
sequence per micro-batch where the case does not say otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from fits.score import Score

from nereus_core.cluster import Cluster, DeviceSpec, LinkSpec
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.shapes import Options
from nereus_core.model import ModelSpec
from nereus_core.workload import ACTOR_TRAIN, BFLOAT16_MIXED, Job, grpo

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
B200 = DeviceSpec(
    "b200", 2.25e15, 180 * 10**9, 8e12, 1.5e-6, 64e9,
    "NVIDIA DGX B200 datasheet (2024): 2.25 PFLOP/s bf16 dense, 180 GB, 8 TB/s; launch as A100",
)  # fmt: skip
NVLINK5 = LinkSpec("nvlink5", 900e9, 3e-6, "NVIDIA B200 datasheet: 1.8 TB/s both directions")
MODELS = {  # Llama 3 herd of models (2024), table 3
    "llama3-70b": (8192, 28672, 64),
    "llama3-405b": (16384, 53248, 128),
}
_TOKENS = 4096


def options_of(*degrees: int) -> Options:
    """One way to lay out a model inside a node."""
    return Options.within_node(*(np.array([d]) for d in degrees))


def predicted(row: dict[str, Any]) -> tuple[float, float]:
    """Peak GiB of the fullest rank and seconds of a step."""
    hidden, intermediate, heads = MODELS[row["model"]]
    model = ModelSpec(
        row["model"], "llama", row["layer_num"], hidden, intermediate, heads, 8, 128, 128256
    )
    degree = {k: int(v) for k, v in re.findall(r"(tp|pp|dp|cp)(\d+)", row["case"])}
    long = re.search(r"seq(\d+)", row["case"])
    slices = degree.get("cp", 1)
    tokens = (int(long[1]) if long else _TOKENS) / slices
    # Where a case does not name dp, the eight devices leave it.
    dp = degree.get("dp", 8 // (degree["tp"] * degree["pp"] * slices)) * slices
    cluster = Cluster.homogeneous(1, 8, B200, NVLINK5, NVLINK5)
    job = Job(
        grpo(), {"actor": model, "ref": model}, cluster, row["mbc"] * dp, int(tokens), 1,
        BFLOAT16_MIXED, sequence_parallel=True, sharded_optimizer=True,
    )  # fmt: skip
    half = tokens / 2
    options = options_of(degree["tp"], degree["pp"], dp)
    table = CostModel(job).table(ACTOR_TRAIN, options, Lengths(half, half, half, half))
    peak = float(table.persistent_bytes[0] + table.transient_bytes[0])
    return peak / 2**30, float(table.seconds[0])


def report(rows: list[dict[str, Any]]) -> dict[str, object]:
    """Scores over the rows that the model covers."""
    known = [r for r in rows if r["model"] in MODELS]
    guesses = np.array([predicted(r) for r in known])
    peak = np.array([r["real_alloc_gib"] for r in known])
    reserved = np.array([r["real_reserved_gib"] for r in known])
    seconds = np.array([r["real_ms"] for r in known]) / 1e3
    context = np.array(["_cp" in r["case"] for r in known])
    factor = float(np.median(seconds / guesses[:, 1]))
    low = guesses[:, 0] < peak
    worst = int(np.argmax(np.abs(guesses[:, 0] / peak - 1)))
    return {
        "peak_memory": Score.of(guesses[:, 0], peak).as_dict(),
        "peak_memory_without_context_parallelism": Score.of(
            guesses[~context, 0], peak[~context]
        ).as_dict(),
        "distinct_layouts": len({(r["case"].split("_mbc")[0]) for r in known}),
        "underestimated": int(low.sum()),
        "largest_underestimate_percent": round(100 * float(np.max(1 - guesses[:, 0] / peak)), 2),
        "worst": {"case": known[worst]["case"], "gib": peak[worst], "predicted": guesses[worst, 0]},
        "reserved_over_allocated": {
            "median": float(np.median(reserved / peak)),
            "max": float(np.max(reserved / peak)),
        },
        "step_seconds_from_priors": Score.of(guesses[:, 1], seconds).as_dict(),
        "step_seconds_after_one_factor": Score.of(factor * guesses[:, 1], seconds).as_dict(),
        "beyond_the_model": {"mixture_of_experts": len(rows) - len(known)},
    }


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    path = Path(os.environ.get("NEREUS_DATA", DATA)) / "simumax" / "b200_runs.json"
    if not path.is_file():
        found: dict[str, object] = {"skipped": f"{path} is absent; set NEREUS_DATA"}
    else:
        found = report(json.loads(path.read_text(encoding="utf-8"))["rows"])
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
