"""How fast the cost model learns a job: two real verl runs replayed in order, one step ahead.

Before each step the model predicts its seconds from that step's lengths and everything seen before;
then it takes the step in. Reported are the error against the number of steps seen, and how often
the stated 90% interval held the measured step: bar 85 to 95%. Beside it stands the plainest rival:
the step takes as long per token as the one before.

    python tests/benchmarks/calibration.py [--json]

Source of the data: diqiuzhuanzhuan/verldata (MIT), Qwen2-7B on 8 GPUs. The logs do not say which
GPUs, nor the rollout's layout: H100 and tp2 are assumed, and calibration has to make up for it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from fits.score import Score

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel, Lengths
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Placement, Plan
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    BFLOAT16_MIXED,
    REF_INFER,
    Job,
    grpo,
)

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LOGS = {
    "qwen2_7b_fsdp_8gpu": Layout(1, 1),
    "qwen2_7b_megatron_tp2pp2_8gpu": Layout(2, 2),
}
"""Each log with the layout it trains in."""
QWEN2_7B = ModelSpec(
    "qwen2-7b", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True
)  # Qwen/Qwen2-7B config.json
_TAIL = 2.0
"""95th percentile over mean of response tokens, which the logs leave out; chosen."""
SEEN = (0, 1, 2, 3, 5, 10, 20, 50, 100)
"""Steps seen from which errors are averaged, up to the next."""
CONFIDENCE = 0.95
"""Of each bound: both together hold with 90%."""


@dataclass(frozen=True, slots=True)
class Point:
    """One step ahead: predicted, bounds, measured, and the rival's prediction."""

    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    same_rate_s: float


def observations(path: Path) -> list[tuple[int, Observation]]:
    """Steps of a log with the number of sequences in each; rows without timings are skipped."""
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if not row["timing_s/step"]:
                continue
            v = {k: float(x) for k, x in row.items() if x}
            prompt, response = v["prompt_length/mean"], v["response_length/mean"]
            count = round(v["perf/total_num_tokens"] / (prompt + response))
            longest = int(v["response_length/max"])
            p95 = max(response, min(_TAIL * response, longest))
            stats = TokenStats(response, response, p95, longest, count)
            prompts = TokenStats(prompt, prompt, prompt, int(v["prompt_length/max"]), count)
            # Testing and saving are in some steps and are no part of what a plan costs.
            beside = v.get("timing_s/testing", 0.0) + v.get("timing_s/save_checkpoint", 0.0)
            stage_s = {
                ACTOR_GENERATE: v["timing_s/gen"],
                REF_INFER: v["timing_s/old_log_prob"],
                ACTOR_TRAIN: v["timing_s/update_actor"],
            }
            step_s = max(sum(stage_s.values()), v["timing_s/step"] - beside)
            seen = Observation(len(found), step_s, stage_s, prompts, stats, {}, frozenset())
            found.append((count, seen))
    return found


def replayed(path: Path, layout: Layout) -> list[Point]:
    """Predict, then learn, step by step."""
    steps = observations(path)
    cluster = Cluster.homogeneous(1, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
    job = Job(
        grpo(), {"actor": QWEN2_7B, "ref": QWEN2_7B}, cluster, steps[0][0], 1024, 1024,
        BFLOAT16_MIXED, micro_batch=8, sharded_optimizer=True,
    )  # fmt: skip
    train = Placement.packed(layout, cluster.devices)
    generate = Placement.packed(Layout(2, 1), cluster.devices)
    plan = Plan({ACTOR_GENERATE: generate, REF_INFER: train, ACTOR_TRAIN: train})
    cost, points, rate = CostModel(job, confidence=CONFIDENCE), list[Point](), 0.0
    for _, seen in steps:
        step = cost.step(plan, Lengths.of(seen)).step
        tokens = seen.prompt_tokens.mean + seen.response_tokens.mean
        points.append(Point(step.mean_s, step.low_s, step.high_s, seen.step_s, rate * tokens))
        cost, rate = cost.refined(plan, seen), seen.step_s / tokens
    return points


def summary(points: list[Point]) -> dict[str, object]:
    """Errors by steps seen, coverage, and the rival."""
    guess, low, high, truth, rival = (
        np.array([getattr(p, name) for p in points])
        for name in ("predicted_s", "low_s", "high_s", "measured_s", "same_rate_s")
    )
    errors = 100 * np.abs(guess / truth - 1)
    ends = [*SEEN[1:], len(points)]
    settled = slice(10, None)
    return {
        "steps": len(points),
        "error_percent_by_steps_seen": {
            str(a): round(float(np.median(errors[a:b])), 2)
            for a, b in zip(SEEN, ends, strict=True)
            if a < len(points)
        },
        "all": Score.of(guess, truth, low, high).as_dict(),
        "after_10": Score.of(guess[settled], truth[settled], low[settled], high[settled]).as_dict(),
        "same_rate_after_10": Score.of(rival[settled], truth[settled]).as_dict(),
        "median_interval_percent": round(
            100 * float(np.median(high[settled] / guess[settled] - 1)), 2
        ),
    }


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    folder = Path(os.environ.get("NEREUS_DATA", DATA)) / "verl_logs"
    found: dict[str, object] = {}
    for name, layout in LOGS.items():
        path = folder / f"{name}.csv"
        if path.is_file():
            found[name] = summary(replayed(path, layout))
        else:
            found[name] = {"skipped": f"{path} is absent; set NEREUS_DATA"}
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
