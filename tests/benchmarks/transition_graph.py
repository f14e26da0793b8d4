"""How long a transition graph takes to compile, and how many resource edges it has.

Three transitions of a GRPO job on 8B models at 32 to 1,024 devices (as values: it needs no device):
``relayout`` changes the layouts of generation and training in place; ``shift`` moves a quarter of
the devices from generation and reference to training; ``swap`` exchanges the two halves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.transition import EdgeKind, compile_transition
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, grpo

NUM_DEVICES = (32, 64, 128, 256, 512, 1024)
REPEATS = 7


def job_on(num_devices: int) -> Job:
    cluster = Cluster.homogeneous(num_devices // 8, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
    models = {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B}
    return Job(grpo(), models, cluster, 3072, 1024, 8192)


def plan(
    generate: tuple[Layout, tuple[Device, ...]],
    train: tuple[Layout, tuple[Device, ...]],
) -> Plan:
    """Generation and reference share devices."""
    packed = Placement.packed(*generate)
    return Plan({ACTOR_GENERATE: packed, REF_INFER: packed, ACTOR_TRAIN: Placement.packed(*train)})


def transitions(devices: tuple[Device, ...]) -> dict[str, tuple[Plan, Plan]]:
    tp8, tp4, pp2 = Layout(8, 1), Layout(4, 1), Layout(8, 2)
    half, quarter = len(devices) // 2, len(devices) // 4
    low, high = devices[:half], devices[half:]
    return {
        "relayout": (plan((tp8, low), (pp2, high)), plan((tp4, low), (tp8, high))),
        "shift": (
            plan((tp8, low), (tp8, high)),
            plan((tp8, low[:quarter]), (tp8, low[quarter:] + high)),
        ),
        "swap": (plan((tp8, low), (tp8, high)), plan((tp8, high), (tp8, low))),
    }


def units_of(target: Plan) -> UnitMap:
    return UnitMap(
        Unit(UnitId(stage, i), placement.layout, devices)
        for stage, placement in target.items()
        for i, devices in enumerate(placement.units)
    )


def measure(num_devices: int) -> dict[str, Any]:
    job = job_on(num_devices)
    found: dict[str, Any] = {}
    for name, (before, after) in transitions(job.cluster.devices).items():
        units, seconds = units_of(before), []
        for _ in range(REPEATS):
            begin_s = time.perf_counter()
            graph = compile_transition(units, after, job, prefix="t")
            seconds.append(time.perf_counter() - begin_s)
        edges = [edge.kind for edge in graph.edges]
        found[name] = {
            "compile_ms_median": round(statistics.median(seconds) * 1e3, 3),
            "compile_ms_min": round(min(seconds) * 1e3, 3),
            "primitives": len(graph.ops),
            "parked": len(graph.parked(graph.by_id)),
            **{f"{kind}_edges": edges.count(kind) for kind in EdgeKind},
            "release_edges_per_unit_acquiring": round(
                edges.count(EdgeKind.RELEASE)
                / max(1, len({e.after for e in graph.edges if e.kind is EdgeKind.RELEASE})),
                2,
            ),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--devices", type=int, nargs="*", default=NUM_DEVICES)
    chosen = parser.parse_args()
    found = {str(n): measure(n) for n in chosen.devices}
    if chosen.json:
        print(json.dumps(found))
        return
    for number, rows in found.items():
        for name, row in rows.items():
            print(f"{number:>5} devices  {name:<9}", *(f"{k}={v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
