"""What a change of a running job costs, against every other way to bring its state across.

A GRPO job whose model has the shapes of SmolLM2-135M (random weights of the same number of bytes,
with real Adam moments after one step: 1.6 GB a replica in float32) runs on CPU seats. Its training
stage grows from 1 to 2 to 4 units and is laid out anew; a smaller model grows from 4 to 8. For each
transition: seconds from the request to the linked job, bytes moved and their lower bound, and the
peak of memory. In the same run, on processes like the seats and the same tensors: the copy
bandwidth of the machine, and the peers of `paths/`, one file each, which say what they reproduce.

What state lands on decides as much as the way it takes: to touch a page for the first time costs
more than to copy it (on a virtual machine ten times). So everything is measured twice, and like is
compared with like. *Cold*: the processes that receive hold no free memory, all of it comes from the
kernel, and on a virtual machine from its host. *Warm*: they have held as much before and kept it,
as seats do (`nereus_adapters.torch.pages`) and as the peers' processes are made to here.

Bars (TARGETS T7, T8): a restart from a checkpoint takes >= 50 times, torch Distributed Checkpoint
through disk >= 10 times as long as the transition; every named peer is beaten; bytes moved equal
the lower bound; peak memory of state < 2x; the cost of an added replica is flat within 1.5x; and
state crosses at >= 70% of the copy bandwidth (memcpy by as many processes as receive; beside it
that of all cores, and that of the kernel's copies between processes, which is the way seats take).
They are judged warm; the same cold stands beside them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paths.crew import Crew, Report, Scenario, crew
from paths.seats import REPEATS, Bench, config, job, say

from nereus_adapters.torch.setup import planned, start
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
"""config.json of HuggingFaceTB/SmolLM2-135M."""
# Its depth and vocabulary cut, so that eight replicas fit beside each other: 0.3 GB each.
SMALL = SMOLLM2 | {"num_hidden_layers": 4, "vocab_size": 16384}
QUICK = SMOLLM2 | {"num_hidden_layers": 4, "vocab_size": 4096}
PEERS = ("gather_scatter", "oobleck", "gemini", "tenplex", "ucp", "dcp")
ONE, TWO = (Layout(1, 1), 0), ((Layout(1, 2), 0), (Layout(1, 2), 1))
EXTEND = Scenario("1->2", (ONE, None), (ONE, ONE))
RELAYOUT = Scenario("pp2->dp2", TWO, (ONE, ONE))


def emu(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Transitions of the running job: growth to four units, a new layout, the way over groups."""
    found: dict[str, dict[str, Any]] = {}
    with job(model, 4, "tp1pp1dp1") as running:
        bench = Bench(running)
        found["1->2"] = bench.repeated("tp1pp1dp2", "tp1pp1dp1")
        found["2->4"] = bench.repeated("tp1pp1dp4", "tp1pp1dp2")
        bench.change("tp1pp2dp1")
        found["pp2->dp2"] = bench.repeated("tp1pp1dp2", "tp1pp2dp1")
        bench.change("tp1pp1dp1")
        running.fleet.may_read = False
        found["1->2 over groups"] = bench.repeated("tp1pp1dp2", "tp1pp1dp1", 1)
        running.step()
    return found


def grow(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Let a job grow from one unit to eight."""
    with job(model, 8, "tp1pp1dp1") as running:
        bench = Bench(running)
        return {
            f"{n}->{2 * n}": bench.repeated(f"tp1pp1dp{2 * n}", f"tp1pp1dp{n}") for n in (1, 2, 4)
        }


def restart(model: dict[str, Any]) -> dict[str, Any]:
    """End the job and start it again with one more unit, through a checkpoint on disk.

    The job's own way (`TorchJob.save`, then a start with ``checkpoint.resume``): processes,
    imports, modules and state anew. The files are in the page cache when they are read, which a
    restart on other machines would not find.
    """
    say("restart")
    with tempfile.TemporaryDirectory(prefix="nereus-bench-") as folder:
        where = Path(folder)
        running = start(config(where, model, 2, "tp1pp1dp1"))
        try:
            running.step()
            plan = planned(running.job, {"actor/train": "tp1pp1dp2"})
            begin_s = time.perf_counter()
            running.save(where / "saved")
            saved_s = time.perf_counter() - begin_s
        finally:
            running.close()
        grown = config(where, model, 2, "tp1pp1dp2")
        resumed = grown.model_copy(
            update={"checkpoint": grown.checkpoint.model_copy(update={"resume": where / "saved"})}
        )
        running = start(resumed, plan)
        seconds = time.perf_counter() - begin_s
        running.close()
    return {"seconds": seconds, "saved_s": saved_s}


def against(
    spec: ModelSpec, scenario: Scenario, ours: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, float]]]:
    """Run the peers' paths on a transition.

    Returns:
        Each path with its ratio to ours; and the copy bandwidth warm and cold, GB/s of all ranks
        that lack something in sum.
    """
    say(f"copies and peers on {scenario.name}")
    bound = scenario.lower_bound(spec)
    with crew(spec, scenario) as processes:
        runs = {name: _both(processes, name) for name in ("copying", *PEERS)}
    cold_copy, warm_copies = runs.pop("copying")
    ceiling = {
        state: {
            name: bound / 1e9 / min(made.marks[name] for made in copies)
            for name in ("one thread", "all cores", "kernel")
        }
        for state, copies in (("cold", [cold_copy]), ("warm", warm_copies))
    }
    found = {}
    for name, (cold, warm) in runs.items():
        best = min(warm, key=lambda report: report.seconds)
        found[name] = {
            "seconds": round(best.seconds, 3),
            "times_ours": round(best.seconds / ours["seconds"], 1),
            "cold_seconds": round(cold.seconds, 3),
            # The seats that are laid out anew have held as much before: there is no cold run.
            "cold_times_ours": None
            if scenario is RELAYOUT
            else round(cold.seconds / ours["first_seconds"], 1),
            "moved_bytes": best.moved_bytes,
            "lower_bound_bytes": bound,
            "cpu_s": round(best.cpu_s, 3),
            "cold_peak_bytes": cold.peak_bytes,
            "parts_s": best.marks,
            "all_seconds": [round(made.seconds, 3) for made in warm],
        }
    return found, ceiling


def _both(processes: Crew, name: str) -> tuple[Report, list[Report]]:
    """Run a path cold once, and warm several times."""
    made = [processes.run(name, cold=n == 0) for n in range(1 + REPEATS)]
    for n, report in enumerate(made):
        say(f"{name}{'' if n else ', cold'}: {report.seconds:.3f} s, {report.marks}")
    return made[0], made[1:]


def measure(quick: bool) -> dict[str, Any]:
    """Run everything, in one run."""
    model = QUICK if quick else SMOLLM2
    spec = ModelSpec.from_hf_config(model, name="actor")
    small = ModelSpec.from_hf_config(SMALL, name="actor")
    growing = emu(model)
    grown = {} if quick else grow(SMALL)
    restarted = restart(model)
    rivals, ceilings = {}, {}
    for scenario in (EXTEND, RELAYOUT):
        name = scenario.name
        rivals[name], ceilings[name] = against(spec, scenario, growing[name])
    for name, found in {**growing, **{f"small {n}": f for n, f in grown.items()}}.items():
        alone = name.removeprefix("small ").startswith("1->2")
        # One process that copies, or two: as many as there are cores here.
        _share(found, ceilings[EXTEND.name if alone else RELAYOUT.name])
    steps = grown or {n: growing[n] for n in ("1->2", "2->4")}
    each = {n: f["seconds"] / int(n.split("->")[0]) for n, f in steps.items()}
    ours, peers = growing["1->2"], rivals["1->2"]
    return {
        "model": "random weights in the shapes of SmolLM2-135M"
        + (", cut to 4 layers and 4,096 tokens" if quick else ""),
        "replica_bytes": 12 * spec.num_params,
        "small_replica_bytes": 12 * small.num_params,
        "bars": {
            "restart_over_transition": round(restarted["seconds"] / ours["seconds"], 1),
            "dcp_over_transition": peers["dcp"]["times_ours"],
            "least_peer_over_transition": _least(rivals, "times_ours"),
            "moved_over_lower_bound": _quotient(growing, grown),
            "share_of_copy_bandwidth": ours["share_of_copy"],
            "share_of_copy_by_all_cores": ours["share_of_copy_by_all_cores"],
            "share_of_copy_by_the_kernel": ours["share_of_copy_by_the_kernel"],
            "seconds_per_added_replica": {n: round(s, 4) for n, s in each.items()},
            "flatness": round(max(each.values()) / min(each.values()), 2),
        },
        "cold": {
            "restart_over_transition": round(restarted["seconds"] / ours["first_seconds"], 1),
            "dcp_over_transition": peers["dcp"]["cold_times_ours"],
            "least_peer_over_transition": _least({"1->2": peers}, "cold_times_ours"),
            "share_of_copy_bandwidth": ours["first_share_of_copy"],
        },
        "copy_gb_per_s": {
            name: {state: _rounded(rates) for state, rates in found.items()}
            for name, found in ceilings.items()
        },
        "transitions": growing,
        "transitions_small": grown,
        "restart": _rounded(restarted),
        "peers": rivals,
    }


def _share(found: dict[str, Any], ceiling: dict[str, dict[str, float]]) -> None:
    """Add the rate of a transition, and which part of the copy bandwidth that is."""
    rate = found["moved_bytes"] / found["seconds"] / 1e9
    first_rate = found["moved_bytes"] / found["first_seconds"] / 1e9
    found["seconds"] = round(found["seconds"], 4)
    found["gb_per_s"] = round(rate, 2)
    found["share_of_copy"] = round(rate / ceiling["warm"]["one thread"], 2)
    found["share_of_copy_by_all_cores"] = round(rate / ceiling["warm"]["all cores"], 2)
    found["share_of_copy_by_the_kernel"] = round(rate / ceiling["warm"]["kernel"], 2)
    found["first_share_of_copy"] = round(first_rate / ceiling["cold"]["one thread"], 2)
    found["first_peak_over_moved"] = round(
        found["first_peak_bytes"] / max(1, found["moved_bytes"]), 2
    )


def _least(rivals: dict[str, dict[str, dict[str, Any]]], what: str) -> float:
    return min(float(found[what]) for paths in rivals.values() for found in paths.values())


def _quotient(*groups: dict[str, dict[str, Any]]) -> float:
    found = [f for group in groups for f in group.values()]
    moved = sum(f["moved_bytes"] for f in found)
    return round(moved / sum(f["lower_bound_bytes"] for f in found), 6)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def show(value: Any, indent: int = 0) -> None:
    """Print nested results, one leaf a line."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            print(" " * indent + str(name))
            show(inner, indent + 2)
        else:
            print(" " * indent + f"{name:<{44 - indent}} {inner}")


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a model of 15 million parameters")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    # A run that is cut short removes its files in memory, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = measure(chosen.quick)
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
