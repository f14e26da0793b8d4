"""Growth by doubling, up to 1,024 -> 2,048 devices: *simulated*, on the cost model's seconds.

What is measured on CPU seats (`transfer.py`, 1->2 to 4->8 replicas) is carried on: a GRPO job on 8B
models doubles the devices of its training stage, each new replica extended from the ones there.
Seconds are those of `CostModel.primitive` on H100 nodes with its conservative start-up
efficiencies, along the compiled graph; nothing of it is run.
"""

from __future__ import annotations

import time
from typing import Any

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Extend
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.transition import compile_transition
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, grpo
from transitions.instances import units_of

LAYOUT = Layout(8, 1)


def growing(*, quick: bool) -> list[dict[str, Any]]:
    """Double the training stage at every size; generation and reference stay on the first node."""
    rows = []
    for before in (16, 64, 256) if quick else (16, 32, 64, 128, 256, 512, 1024):
        after = 2 * before
        cluster = Cluster.homogeneous(after // 8, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
        models = {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B}
        job = Job(grpo(), models, cluster, after * 8, 1024, 8192)
        devices = cluster.devices
        rest = Placement.packed(LAYOUT, devices[:8])

        def plan(count: int, rest: Placement = rest, devices: Any = devices) -> Plan:
            train = Placement.packed(LAYOUT, devices[:count])
            return Plan({ACTOR_GENERATE: rest, REF_INFER: rest, ACTOR_TRAIN: train})

        begin_s = time.process_time()
        graph = compile_transition(units_of(plan(before)), plan(after), job, prefix="g")
        compile_s = time.process_time() - begin_s
        seconds = graph.predicted(CostModel(job))
        added = sum(isinstance(op, Extend) for op in graph.ops)
        rows.append(
            {
                "gpus": f"{before}->{after}",
                "simulated_s": round(seconds.mean_s, 3),
                "low_s": round(seconds.low_s, 3),
                "high_s": round(seconds.high_s, 3),
                "added_replicas": added,
                "rounds": graph.depth,
                "compile_ms": round(compile_s * 1e3, 2),
            }
        )
    return rows
