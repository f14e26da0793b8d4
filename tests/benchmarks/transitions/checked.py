"""Every interleaving of every transition between small plans (see tests/support/interleavings)."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from interleavings import distinct_pairs, explore, small_plans
from rich.console import Console
from rich.progress import track

from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.sim.models import TINY
from nereus_core.transition import compile_transition
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, Node, Workload
from transitions.instances import units_of

LAYOUTS = (Layout(1, 1), Layout(2, 1), Layout(4, 1))


def checked(*, quick: bool) -> dict[str, Any]:
    """Explore all pairs of plans of up to four units on four devices; three stages, quick two.

    Pairs that are alike but for the names of devices are explored once.
    """
    begin_s = time.perf_counter()
    nodes = (Node(ACTOR_GENERATE, weights_from=ACTOR_TRAIN), Node(REF_INFER), Node(ACTOR_TRAIN))
    workload = Workload("grpo", nodes[1:] if quick else nodes)
    cluster = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
    job = Job(workload, {"actor": TINY, "ref": TINY}, cluster, 12, 16, 32)
    plans = small_plans(workload.stages, cluster.devices, LAYOUTS, max_units=4)
    graphs = states = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        pairs = list(distinct_pairs(plans, cluster.devices))
        counted = workers.map(partial(_states, job), pairs)
        shown = track(counted, "exploring", len(pairs), console=Console(stderr=True))
        for seen, (_, afters) in zip(shown, pairs, strict=True):
            states += seen
            graphs += len(afters)
    return {
        "stages": len(workload.nodes),
        "plans": len(plans),
        "pairs": len(plans) ** 2,
        "graphs": graphs,
        "states": states,
        "stuck": 0,  # explore raises at the first
        "seconds": round(time.perf_counter() - begin_s, 1),
    }


def _states(job: Job, pair: tuple[Plan, list[Plan]]) -> int:
    """Explore the transitions from one plan; return how many states they have."""
    before, afters = pair
    units = units_of(before)
    return sum(explore(compile_transition(units, after, job, prefix="t"), job) for after in afters)
