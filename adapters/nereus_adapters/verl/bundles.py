"""Bundles: the Ray bundle that stands for each device of a job, and who is on it.

A device is a bundle of a placement group. Trainers and rollout replicas hold it by turns, or for
the length of a transition both; where nobody holds any bundle of a group, Ray has it back. The
group that verl made for its trainers stays with the job.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus_adapters.ray_bundles import placed, removed
from nereus_core.cluster import Device
from nereus_core.errors import Infeasible
from nereus_core.units import UnitId

COLOCATED = 3
"""Processes that verl lets share a bundle of its trainers': ResourcePoolManager's own default."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle of a placement group."""

    group: Any
    index: int


class Bundles:
    """Bundles by device. Safe to share by threads.

    Args:
        trainers: Bundles that verl made for its trainers.
        replicas: Bundles that it made for standalone replicas, by holder.
    """

    def __init__(
        self,
        trainers: Mapping[Device, Bundle],
        replicas: Mapping[UnitId, Mapping[Device, Bundle]],
    ) -> None:
        self._at = dict(trainers)
        self._kept = {bundle.group.id for bundle in trainers.values()}
        self._holders: dict[Device, set[object]] = {device: {"verl"} for device in trainers}
        self._lock = threading.Lock()
        """Held while Ray places a group, so for `ray_bundles.PLACED_S` at most."""
        for holder, bundles in replicas.items():
            self._at |= bundles
            for device in bundles:
                self._holders.setdefault(device, set()).add(holder)

    def hold(self, devices: Sequence[Device], holder: object) -> dict[Device, Bundle]:
        """Return the bundles of some devices of one node, in their order.

        Devices that have none get bundles of one new group on their node: which accelerators of it
        these are is Ray's choice.

        Raises:
            DevicesMissing: Ray has not as many free devices there.
            Infeasible: they are on several nodes.
        """
        nodes = sorted({device.node for device in devices})
        if len(nodes) > 1:
            raise Infeasible(f"{', '.join(map(str, devices))} are on {', '.join(nodes)}, not one.")
        with self._lock:
            absent = [device for device in devices if device not in self._at]
            if absent:
                group = placed(nodes[0], len(absent), cpus=COLOCATED)
                self._at |= {d: Bundle(group, index) for index, d in enumerate(absent)}
            for device in devices:
                self._holders.setdefault(device, set()).add(holder)
            return {device: self._at[device] for device in devices}

    def let_go(self, devices: Collection[Device], holder: object) -> None:
        """Give groups back to Ray that nobody is on any more."""
        with self._lock:
            for device in devices:
                self._holders.get(device, set()).discard(holder)
            groups = {bundle.group.id: bundle.group for bundle in self._at.values()}
            for key, group in groups.items():
                members = [d for d, bundle in self._at.items() if bundle.group.id == key]
                if key in self._kept or any(self._holders.get(d) for d in members):
                    continue
                removed(group)
                for device in members:
                    del self._at[device]
                    self._holders.pop(device, None)


def runs(bundles: Mapping[Device, Bundle]) -> list[list[Device]]:
    """Cut devices, in order, into runs of neighbors in one placement group."""
    found: list[list[Device]] = []
    last: tuple[Any, int] | None = None
    for device, bundle in bundles.items():
        if last != (bundle.group.id, bundle.index - 1):
            found.append([])
        found[-1].append(device)
        last = bundle.group.id, bundle.index
    return found


def pool_over(bundles: Sequence[Bundle], name: str) -> Any:
    """Return verl's resource pool over a run of neighbors: it starts processes side by side."""
    from verl.single_controller.ray.base import SubRayResourcePool

    first = bundles[0]
    return SubRayResourcePool(
        placement_groups=[first.group],
        start_bundle_index=first.index,
        subgroup_world_size=len(bundles),
        process_on_nodes=[first.group.bundle_count],
        use_gpu=True,
        max_colocate_count=COLOCATED,
        name_prefix=f"nereus_{name}",
    )


def bundles_of(pool: Any) -> list[Bundle]:
    """Return the bundles of a pool of verl's, in order of rank."""
    return [Bundle(group, index) for group in pool.pgs for index in range(pool.store[0])]
