"""Bundles: the Ray bundle that stands for each device of a job, and who is on it.

A device is a bundle of a placement group. Trainers and rollout replicas hold it by turns, or for
the length of a transition both; where nobody holds any bundle of a group, Ray has it back. The
group that verl made for its trainers stays with the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from nereus_core.cluster import Device
from nereus_core.errors import DevicesMissing, Infeasible
from nereus_core.units import UnitId

COLOCATED = 3
"""Processes that verl lets share a bundle of its trainers': ResourcePoolManager's own default."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle of a placement group."""

    group: Any
    index: int


class Bundles:
    """Bundles by device.

    Args:
        kind: verl's name of the devices, e.g. ``cuda``.
        trainers: Bundles that verl made for its trainers.
        replicas: Bundles that it made for standalone replicas, by holder.
    """

    def __init__(
        self,
        kind: str,
        trainers: Mapping[Device, Bundle],
        replicas: Mapping[UnitId, Mapping[Device, Bundle]],
    ) -> None:
        self._kind, self._made = kind, 0
        self._at = dict(trainers)
        self._kept = {bundle.group.id for bundle in trainers.values()}
        self._holders: dict[Device, set[object]] = {device: {"verl"} for device in trainers}
        for holder, bundles in replicas.items():
            self._at |= bundles
            for device in bundles:
                self._holders.setdefault(device, set()).add(holder)

    def hold(self, devices: Sequence[Device], holder: object, name: str) -> Any:
        """Return verl's resource pool over the bundles of some devices, in their order.

        Devices that have none get bundles of one new group: which accelerators of Ray's these are
        is Ray's choice.

        Raises:
            DevicesMissing: Ray has not as many free devices.
            Infeasible: verl starts the processes of a pool in one group, side by side.
        """
        absent = [device for device in devices if device not in self._at]
        if not absent:
            pool = self._side_by_side(devices, name)
        elif len(absent) == len(devices):
            pool = self._new(devices, name)
        else:
            raise self._scattered(devices)
        for device in devices:
            self._holders.setdefault(device, set()).add(holder)
        return pool

    def let_go(self, devices: Collection[Device], holder: object) -> None:
        """Give groups back to Ray that nobody is on any more."""
        for device in devices:
            self._holders.get(device, set()).discard(holder)
        groups = {bundle.group.id: bundle.group for bundle in self._at.values()}
        for key, group in groups.items():
            members = [d for d, bundle in self._at.items() if bundle.group.id == key]
            if key in self._kept or any(self._holders.get(d) for d in members):
                continue
            with suppress(Exception):  # it goes with the job at the latest
                ray.util.remove_placement_group(group)
            for device in members:
                del self._at[device]
                self._holders.pop(device, None)

    def _new(self, devices: Sequence[Device], name: str) -> Any:
        from verl.single_controller.ray.base import RayResourcePool

        free = int(ray.available_resources().get("GPU", 0))
        if free < len(devices):
            raise DevicesMissing("GPU", len(devices), free)
        self._made += 1
        pool = RayResourcePool(
            [len(devices)],
            use_gpu=True,
            max_colocate_count=COLOCATED,
            name_prefix=f"nereus_{name}_{self._made}",
        )
        pool.get_placement_groups(device_name=self._kind)
        self._at |= dict(zip(devices, bundles_of(pool), strict=True))
        return pool

    def _side_by_side(self, devices: Sequence[Device], name: str) -> Any:
        from verl.single_controller.ray.base import SubRayResourcePool

        bundles = [self._at[device] for device in devices]
        first = bundles[0]
        wanted = [Bundle(first.group, first.index + i) for i in range(len(bundles))]
        if [(b.group.id, b.index) for b in bundles] != [(b.group.id, b.index) for b in wanted]:
            raise self._scattered(devices)
        return SubRayResourcePool(
            placement_groups=[first.group],
            start_bundle_index=first.index,
            subgroup_world_size=len(bundles),
            process_on_nodes=[first.group.bundle_count],
            use_gpu=True,
            max_colocate_count=COLOCATED,
            name_prefix=f"nereus_{name}",
        )

    def _scattered(self, devices: Sequence[Device]) -> Infeasible:
        named = ", ".join(map(str, devices))
        return Infeasible(
            f"{named} are no neighbors in one of Ray's placement groups, where verl would start "
            "the processes of one replica. Free them in one transition, use them in another."
        )


def bundles_of(pool: Any) -> list[Bundle]:
    """Return the bundles of a pool of verl's, in order of rank."""
    return [Bundle(group, index) for group in pool.pgs for index in range(pool.store[0])]
