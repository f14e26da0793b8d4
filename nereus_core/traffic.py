"""Traffic: the bytes that a primitive moves between devices and those that it leaves in place."""

from __future__ import annotations

from nereus_core.primitives import Primitive, created, model_stage_of, sources
from nereus_core.state import needed_elements, placed
from nereus_core.units import UnitMap
from nereus_core.workload import Job


def primitive_bytes(op: Primitive, units: UnitMap, job: Job) -> tuple[int, int]:
    """Count the least bytes that cross between devices, and those that stay on theirs.

    Args:
        op: The primitive.
        units: Units that state can be read from: alive, or parked.
        job: Shapes and precision.

    Returns:
        Bytes moved and bytes kept; their sum is the state of the units created.
    """
    stage = model_stage_of(op)
    model, each = job.model(stage), job.precision.kept_bytes(stage.stage)
    read = [units[u] for u in sources(op)]
    before = [part for u in read for part in placed(model, u.layout, u.devices)]
    after = [part for u in created(op) for part in placed(model, u.layout, u.devices)]
    needed = needed_elements(before, after)
    total = sum(box.num_elements for _, shard in after for box in shard.values())
    return each * needed, each * (total - needed)
