"""peaks: what verl reports of a step's memory, as the largest allocation on every device."""

from __future__ import annotations

from collections.abc import Mapping

from nereus_adapters.verl.standing import ROLES
from nereus_adapters.verl.switching import serving
from nereus_core.cluster import Device
from nereus_core.units import UnitMap
from nereus_core.workload import Job, Stage


def device_peaks(
    by_role: Mapping[str, int], units: UnitMap, job: Job, resident: bool
) -> dict[Device, int]:
    """Charge every device of a stage with the largest allocation of its ranks.

    verl asks the ranks that have outputs. Of a pipeline those are the last stage's, which hold one
    micro-batch where the first holds as many as there are stages: its units are left out.

    Args:
        by_role: Bytes that verl reports, of the trainers' own processes.
        units: Those that stepped.
        job: Whose replicas' weights lie in other processes on the same devices.
        resident: Whether they lie there while the trainers compute.
    """
    peaks: dict[Device, int] = {}
    for unit in units.values():
        for role, peak in by_role.items():
            if unit.model_stage == ROLES[role] and unit.layout.pp == 1:
                peaks |= {d: max(peak, peaks.get(d, 0)) for d in unit.devices}
    if not resident:
        return peaks
    each = job.precision.kept_bytes(Stage.GENERATE)
    for unit in serving(units).values():
        weights = each * job.model(unit.model_stage).num_params // len(unit.devices)
        peaks |= {d: peaks[d] + weights for d in unit.devices if d in peaks}
    return peaks
