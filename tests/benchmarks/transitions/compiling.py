"""Compile time, against SCIP on the same transition.

CPU seconds on both sides, each on one thread: what else the machine does meanwhile counts for none.
Every repeat has a job, plans and units of its own, made before the clock starts: nothing is known
from an earlier call but shapes of models (`cost.transition`, by model and layout). ``ms`` is
`compile_transition`, which decides all; ``ms_read`` is that and every primitive and edge read as
values, reasons spelled.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from nereus_core.cost import CostModel
from nereus_core.transition import EdgeKind, compile_transition
from transitions.instances import job_on, transitions, units_of
from transitions.rival import scip_s

SIZES = (32, 64, 128, 256, 512, 1024, 4096)
REPEATS = 9
LIMIT_S = {32: 20.0, 1024: 180.0}
"""CPU seconds that SCIP may take at the sizes where it runs; quick: a tenth."""
BAR_MS = 1.22
BAR_RATIO = 10_000


def compiling(*, quick: bool) -> list[dict[str, Any]]:
    """Measure every transition at every size."""
    rows = []
    for num_devices in SIZES[::5] if quick else SIZES:
        for name in transitions(job_on(num_devices).cluster.devices):
            seconds, read_seconds = [], []
            for _ in range(REPEATS):
                job = job_on(num_devices)
                before, after = transitions(job.cluster.devices)[name]
                units = units_of(before)
                begin_s = time.process_time()
                graph = compile_transition(units, after, job, prefix="t")
                seconds.append(time.process_time() - begin_s)
                assert len(graph.ops) + len(graph.edges)
                read_seconds.append(time.process_time() - begin_s)
            edges = [edge.kind for edge in graph.edges]
            row = {
                "gpus": num_devices,
                "transition": name,
                "ms": round(statistics.median(seconds) * 1e3, 3),
                "ms_read": round(statistics.median(read_seconds) * 1e3, 3),
                "scip_ms": None,
                "status": None,
                "ratio": None,
                "bar": None,
                "primitives": len(graph.ops),
                "parked": len(graph.parked(graph.by_id)),
                **{f"{kind}_edges": edges.count(kind) for kind in EdgeKind},
            }
            if num_devices in LIMIT_S:
                limit_s = LIMIT_S[num_devices] / (10 if quick else 1)
                solved_s, status = scip_s(graph, CostModel(job), limit_s)
                ratio = solved_s / statistics.median(seconds)
                row |= {
                    "scip_ms": round(solved_s * 1e3, 1),
                    "status": status,
                    "ratio": round(ratio),
                    "bar": row["ms"] <= BAR_MS or ratio >= BAR_RATIO,
                }
            rows.append(row)
    return rows
