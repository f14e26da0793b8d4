"""Every interleaving of every transition between small plans (see tests/support/interleavings)."""

from __future__ import annotations

import time
from typing import Any

from interleavings import distinct, explore, small_plans

from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.layout import Layout
from nereus_core.sim.models import TINY
from nereus_core.transition import compile_transition
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, Node, Workload
from transitions.instances import units_of


def checked(*, quick: bool) -> dict[str, Any]:
    """Explore all plans of up to four units of three model-stages on four devices."""
    begin_s = time.perf_counter()
    nodes = (Node(ACTOR_GENERATE, weights_from=ACTOR_TRAIN), Node(REF_INFER), Node(ACTOR_TRAIN))
    workload = Workload("grpo", nodes[1:] if quick else nodes)
    layouts = (Layout(1, 1), Layout(2, 1), Layout(4, 1))
    cluster = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
    job = Job(workload, {"actor": TINY, "ref": TINY}, cluster, 12, 16, 32)
    plans = small_plans(workload.stages, cluster.devices, layouts, max_units=4)
    # Three stages: every 40th target of every plan; their order is by stage, so all are met.
    every = 1 if quick else 40
    graphs = states = 0
    for number, before in enumerate(distinct(plans, cluster.devices)):
        units = units_of(before)
        for after in plans[number % every :: every]:
            states += explore(compile_transition(units, after, job, prefix="t"), job)
            graphs += 1
    return {
        "stages": len(workload.nodes),
        "plans": len(plans),
        "graphs": graphs,
        "share_of_pairs": round(1 / every, 3),
        "states": states,
        "stuck": 0,  # explore raises at the first
        "seconds": round(time.perf_counter() - begin_s, 1),
    }
