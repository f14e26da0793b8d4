"""Transitions of a GRPO job on 8B models, at any number of devices (as values: it needs none).

``relayout`` changes the layouts of generation and training in place; ``shift`` moves a quarter of
the devices from generation and reference to training; ``swap`` exchanges the two halves.
"""

from __future__ import annotations

import random
from dataclasses import replace

from nereus_core.cluster import Cluster, Device, DeviceSpec
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, grpo, ppo


def job_on(num_devices: int) -> Job:
    cluster = Cluster.homogeneous(num_devices // 8, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
    models = {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B}
    return Job(grpo(), models, cluster, 3072 * 4, 1024, 8192)


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


AMPLE = replace(H100_SXM, memory_bytes=8 * H100_SXM.memory_bytes)
"""Memory out of the question."""


def random_change(
    rng: random.Random, num_devices: int, spec: DeviceSpec = AMPLE
) -> tuple[Job, Plan, Plan]:
    """Draw a PPO job, and two plans of it: stages in any layouts, on any run of devices."""
    per_node = min(8, num_devices)
    cluster = Cluster.homogeneous(num_devices // per_node, per_node, spec, NVLINK4, INFINIBAND_NDR)
    models = {
        "actor": LLAMA_3_1_8B,
        "ref": LLAMA_3_1_8B,
        "critic": LLAMA_3_1_8B.as_critic("critic"),
    }
    job = Job(ppo(), models, cluster, 27720 * 16, 1024, 8192)
    least = num_devices // 8
    return job, _drawn(rng, job, least), _drawn(rng, job, least)


def _drawn(rng: random.Random, job: Job, least: int) -> Plan:
    placements = {}
    for stage in job.workload.stages:
        tp, pp = rng.choice([(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2)])
        layout = Layout(tp, pp)
        most = len(job.cluster.devices) // layout.num_devices
        dp = rng.choice([d for d in range(1, most + 1) if d * layout.num_devices >= least])
        first = rng.randrange(most - dp + 1) * layout.num_devices
        devices = job.cluster.devices[first : first + dp * layout.num_devices]
        placements[stage] = Placement.packed(layout, devices)
    return Plan(placements)
