"""What a change of layout costs on real seats, against a restart of the same job.

A small Llama trains on four CPU seats; its plan goes through a cycle of layouts. For each
transition: seconds, bytes moved and their lower bound, and the peak of state bytes on a seat
against the larger of its old and new shard. The rival is the least that a restart costs: seats,
modules and weights anew, measured by launching the same job, without writing or reading a
checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from nereus_adapters.torch.adapter import TorchAdapter
from nereus_adapters.torch.job import TorchJob
from nereus_adapters.torch.setup import planned, start
from nereus_core.adapter import Receipt
from nereus_core.config import NereusConfig
from nereus_core.events import EventLog
from nereus_core.plan import Plan
from nereus_core.state import placed, shard_bytes
from nereus_core.traffic import primitive_bytes
from nereus_core.transition import compile_transition, execute
from nereus_core.units import UnitMap
from nereus_core.workload import Stage

CYCLE = ("tp1pp1dp4", "tp2pp1dp2", "tp4pp1dp1", "tp1pp4dp1", "tp2pp2dp1", "tp1pp1dp2", "tp1pp1dp4")


def config(run_dir: Path, hidden: int) -> NereusConfig:
    """Describe the job; ``hidden`` sets its size."""
    model = {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2051,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
    job = {
        "model": model,
        "prompts_per_step": 8,
        "responses_per_prompt": 2,
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "plan": {"actor/train": CYCLE[0]},
        "task_args": {"response_tokens": 8},
    }
    return NereusConfig.of({"run_dir": run_dir, "job": job, "backend": {"seats": 4}})


def peak_ratio(receipt: Receipt, units: UnitMap, running: TorchJob) -> float:
    """Largest ratio of peak resident state to the larger of a seat's old and new state."""
    after = units.replace(receipt.ended, receipt.created)

    def held(some: UnitMap, device: object) -> int:
        return sum(
            shard_bytes(shard, running.job.precision, unit.model_stage.stage)
            for unit in some.values()
            for where, shard in placed(
                running.job.model(unit.model_stage), unit.layout, unit.devices
            )
            if where == device
        )

    return max(
        (peak / max(held(units, d), held(after, d)) for d, peak in receipt.peak_bytes.items()),
        default=0.0,
    )


def change(
    adapter: TorchAdapter, running: TorchJob, target: Plan, number: int
) -> dict[str, object]:
    """Move the running job to a plan; return what it cost."""
    before = running.units
    graph = compile_transition(before, target, running.job, prefix=f"b{number}")
    begin_s = time.perf_counter()
    with (
        adapter.boundary(graph.stages, timeout_s=60),
        EventLog(None, time.monotonic) as log,
    ):
        outcome = execute(graph, adapter, log=log, timeout_s=120)
        adapter.relink(target)
    elapsed_s = time.perf_counter() - begin_s
    units, bound, ratio = before, 0, 0.0
    for op in graph.topological():
        receipt = outcome.receipts[op.op_id]
        bound += primitive_bytes(op, units, running.job)[0]
        ratio = max(ratio, peak_ratio(receipt, units, running))
        units = units.replace(receipt.ended, receipt.created)
    return {
        "seconds": round(elapsed_s, 4),
        "moved_bytes": outcome.moved_bytes,
        "bound_bytes": bound,
        "peak_over_larger_shard": round(ratio, 3),
        "primitives": len(graph.ops),
    }


def measure(hidden: int) -> dict[str, object]:
    """Launch, go through the cycle, compare."""
    with tempfile.TemporaryDirectory() as folder:
        settings = config(Path(folder), hidden)
        start(settings).close()  # converts the model once, so that the launch below is warm
        begin_s = time.perf_counter()
        running = start(settings)
        restart_s = time.perf_counter() - begin_s
        try:
            adapter = TorchAdapter(running)
            running.step()
            found = {}
            for number, (old, new) in enumerate(pairwise(CYCLE)):
                plan = planned(running.job, {"actor/train": new})
                others = dict(Plan.of_units(running.units).items())
                train = next(s for s in plan if s.stage is Stage.TRAIN)
                target = Plan({**others, train: plan[train]})
                found[f"{old}->{new}"] = change(adapter, running, target, number)
                running.step()
            params = running.job.models["actor"].num_params
        finally:
            running.close()
    seconds = [float(str(f["seconds"])) for f in found.values()]
    return {
        "parameters": params,
        "train_state_bytes": params * 12,
        "restart_s": round(restart_s, 3),
        "median_transition_s": round(statistics.median(seconds), 4),
        "restart_over_transition": round(restart_s / statistics.median(seconds), 1),
        "moved_over_bound": round(
            sum(int(str(f["moved_bytes"])) for f in found.values())
            / sum(int(str(f["bound_bytes"])) for f in found.values()),
            6,
        ),
        "worst_peak_over_larger_shard": max(
            float(str(f["peak_over_larger_shard"])) for f in found.values()
        ),
        "transitions": found,
    }


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512, help="size of the model")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    result = measure(chosen.hidden)
    if chosen.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        print(f"{name:<32} {value}", file=sys.stdout)


if __name__ == "__main__":
    main()
