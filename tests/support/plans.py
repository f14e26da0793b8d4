"""Random plans for property tests: stages colocated or not, any layouts the tiny model allows."""

from __future__ import annotations

from hypothesis import strategies as st

from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.layout import layouts
from nereus_core.plan import Placement, Plan
from nereus_core.sim.models import TINY
from nereus_core.workload import Job, grpo, ppo

GLOBAL_BATCH = 840  # every dp from 1 to 8 divides it


def tiny_job(num_devices=8, workload=None):
    per_node = 4 if num_devices % 4 == 0 else num_devices
    cluster = Cluster.homogeneous(num_devices // per_node, per_node, CPU_SEAT, LOOPBACK, LOOPBACK)
    models = {"actor": TINY, "ref": TINY, "critic": TINY.as_critic("critic")}
    return Job(workload or grpo(), models, cluster, GLOBAL_BATCH, 16, 32)


@st.composite
def jobs(draw):
    return tiny_job(draw(st.integers(4, 8)), draw(st.sampled_from([grpo(), ppo()])))


@st.composite
def placements(draw, devices):
    layout = draw(st.sampled_from(layouts(TINY, len(devices), "divisors")))
    dp = draw(st.integers(1, len(devices) // layout.num_devices))
    order = draw(st.permutations(devices)) if draw(st.booleans()) else devices
    first = draw(st.integers(0, len(devices) - dp * layout.num_devices))
    return Placement.packed(layout, tuple(order[first : first + dp * layout.num_devices]))


@st.composite
def plans(draw, job, devices=None):
    devices = devices or job.cluster.healthy
    return Plan({stage: draw(placements(devices)) for stage in job.workload.stages})


@st.composite
def changes(draw):
    """A job, the plan it runs, devices it loses, and a plan on what is left."""
    job = draw(jobs())
    devices = job.cluster.devices
    before = draw(plans(job))
    lost = draw(st.sets(st.sampled_from(devices), max_size=2)) if draw(st.booleans()) else set()
    left = tuple(d for d in devices if d not in lost)
    after = draw(plans(job, left))
    if draw(st.booleans()):  # leave some stages as they are, where that is possible
        same = {s: p for s, p in before.items() if lost.isdisjoint(p.devices)}
        kept = draw(st.sets(st.sampled_from(sorted(same)))) if same else set()
        after = Plan({s: same[s] if s in kept else p for s, p in after.items()})
    return job, before, frozenset(lost), after
