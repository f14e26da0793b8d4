"""How long a decision takes, 32 to 1,024 devices: PPO of Llama-3.1-8B on H100 nodes of eight.

Per number of devices and mean response length: seconds of a first plan, of planning again around
the plan found, and of the bound check that needs no search. Ratios compare within this run.

    python tests/benchmarks/planner.py [--json] [--devices 32,1024] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel, Lengths
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.planner import Constraints, best, still_good
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import BFLOAT16_MIXED, Job, ppo

RESPONSES = {"short": 512.0, "middle": 2048.0, "long": 8192.0}


def cost_of(num_devices: int) -> CostModel:
    """A PPO job on so many devices."""
    cluster = Cluster.homogeneous(num_devices // 8, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
    critic = LLAMA_3_1_8B.as_critic("critic")
    models = {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B, "critic": critic}
    return CostModel(Job(ppo(), models, cluster, 1024, 1024, 16384, BFLOAT16_MIXED))


def median_s(repeat: int, call: Callable[[], object]) -> float:
    """Median wall seconds of a call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(num_devices: int, name: str, repeat: int) -> dict[str, object]:
    """One row of the report."""
    mean = RESPONSES[name]
    lengths, constraints = Lengths(512, mean, 2 * mean, 2 * mean), Constraints()
    planned = best(cost_of(num_devices), lengths, constraints)
    plan = planned.best.plan

    def warm() -> CostModel:  # a model without tables kept from the call before
        return cost_of(num_devices)

    return {
        "devices": num_devices,
        "responses": name,
        "plan_s": median_s(repeat, lambda: best(warm(), lengths, constraints)),
        "replan_s": median_s(repeat, lambda: best(warm(), lengths, constraints, plan)),
        "still_good_s": median_s(
            repeat, lambda: still_good(warm(), lengths, constraints, plan, 0.05)
        ),
        "searched": planned.searched,
        "step_s": planned.best.step.step.mean_s,
        "plan": str(plan),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--devices", default="32,64,128,256,512,1024")
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    sizes = [int(n) for n in asked.devices.split(",")]
    rows = [measure(n, name, asked.repeat) for n in sizes for name in RESPONSES]
    slowest = {n: max(float(str(r["plan_s"])) for r in rows if r["devices"] == n) for n in sizes}
    growth = slowest[sizes[-1]] / slowest[sizes[0]]
    report = {"rows": rows, "slowest_plan_s": slowest, "last_over_first": growth}
    if asked.json:
        json.dump(report, sys.stdout, indent=2)
        print()
        return
    print(f"{'devices':>8} {'responses':>10} {'plan':>10} {'replan':>10} {'bound':>10} {'step':>9}")
    for r in rows:
        print(
            f"{r['devices']:>8} {r['responses']:>10} {r['plan_s'] * 1e3:>7.1f} ms "
            f"{r['replan_s'] * 1e3:>7.1f} ms {r['still_good_s'] * 1e3:>7.2f} ms "
            f"{r['step_s']:>7.2f} s"
        )
    print(f"slowest at {sizes[-1]} / slowest at {sizes[0]} devices: {growth:.2f}")


if __name__ == "__main__":
    main()
