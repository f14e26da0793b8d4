"""Seconds of a primitive: a fixed part, and the bytes through the busiest device."""

from __future__ import annotations

from collections import defaultdict

from nereus_core.cluster import Device
from nereus_core.primitives import Primitive, created, sources
from nereus_core.state import placed, routes
from nereus_core.units import UnitMap
from nereus_core.workload import Job, Stage

FIXED_S = 0.1
"""Groups, modules and hand-shakes of one primitive; chosen near what gloo seats measured (0.05 to
0.2 s), corrected online by `CostModel.refined_transition`."""


def busiest_seconds(job: Job, op: Primitive, units: UnitMap) -> float:
    """Return seconds at peak link rates for the device that sends or receives most.

    Raises:
        KeyError: no source holds a part of the new units' state; names it.
    """
    made = created(op)
    if not made:
        return 0.0
    model, stage = job.model(made[0].model_stage), made[0].model_stage.stage

    read = tuple(units[s] for s in sources(op) if s in units)
    before = [pair for u in read for pair in placed(model, u.layout, u.devices)]
    after = [pair for u in made for pair in placed(model, u.layout, u.devices)]
    precision = job.precision
    each = precision.train_bytes if stage is Stage.TRAIN else precision.param_bytes
    load: dict[tuple[Device, bool], float] = defaultdict(float)
    for route in routes(before, after):
        if route.is_local:
            continue
        crosses = route.source.node != route.target.node
        link = job.cluster.inter_node if crosses else job.cluster.intra_node
        seconds = route.box.num_elements * each / link.bytes_per_s
        load[route.source, True] += seconds
        load[route.target, False] += seconds
    return max(load.values(), default=0.0)
