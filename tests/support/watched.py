"""A controller on a job in memory, with all it said."""

from memory_job import MemoryJob

from nereus_core.cluster import Cluster
from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.device_specs import H200_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.errors import (
    UnitLost,
)
from nereus_core.events import (
    EventLog,
)
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.sim.models import LLAMA_3_1_8B
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, BFLOAT16_MIXED, REF_INFER, Job, grpo


def big_job(num_devices=8, batch=64):
    cluster = Cluster.homogeneous(1, num_devices, H200_SXM, NVLINK4, INFINIBAND_NDR)
    models = {"actor": LLAMA_3_1_8B, "ref": LLAMA_3_1_8B}
    return Job(grpo(), models, cluster, batch, 512, 8192, BFLOAT16_MIXED, 2)


def packed(job, **layouts):
    """A plan with every stage on all healthy devices."""
    stages = {"generate": ACTOR_GENERATE, "train": ACTOR_TRAIN, "ref": REF_INFER}
    return Plan(
        {
            stages[name]: Placement.packed(Layout(*layout), job.cluster.healthy)
            for name, layout in layouts.items()
        }
    )


class Watched:
    """A controller on a memory job, with all it said."""

    def __init__(self, job, plan, *, config=None, veto=None, **options):
        self.events, self.told = [], []
        self.job = MemoryJob(job, plan, **options)
        log = EventLog(None, lambda: 0.0)
        log.subscribe(lambda event, at_s: self.events.append(event))
        more = {} if veto is None else {"veto": veto}
        self.controller = Controller(
            self.job.adapter,
            NereusConfig.of(config or {}),
            log,
            lambda hook, **values: self.told.append(hook),
            lambda: 0.0,
            **more,
        )

    def run(self, *tokens):
        """Step and meet the boundary; returns the decisions."""
        found = []
        for mean in tokens:
            try:
                self.job.step(mean)
            except UnitLost:
                found.append(self.controller.at_boundary())
                self.job.step(mean)
            found.append(self.controller.at_boundary())
        return found

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]


def good_plan(job, tokens):
    """What the controller itself settles on for a length."""
    watched = Watched(job, packed(job, generate=(8, 1), train=(8, 1), ref=(8, 1)))
    watched.run(*[tokens] * 6)
    return watched.controller.plan
