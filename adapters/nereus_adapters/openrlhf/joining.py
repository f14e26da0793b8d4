"""Joining: devices that a job did not start with, out of what Ray has free, and back to Ray.

`backend.max_devices` says how many devices the job may hold. What Ray has free beyond those that it
holds is *offered*: plans may use it. An offered device is asked for when a unit comes to it, in a
placement group for all devices of the unit that are on one node, and given back when no unit is on
any device of that group. Its name is the next index of its node that the job does not hold: which
GPU that is, is Ray's choice, made when it is asked for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import ray

from nereus_adapters import ray_bundles
from nereus_adapters.openrlhf.seats import Bundle
from nereus_core.cluster import Device

if TYPE_CHECKING:
    from nereus_adapters.openrlhf.running import Running

_log = logging.getLogger("nereus")
_lock = threading.Lock()
"""Held while Ray places a group: primitives of one transition run at once."""


def look(running: Running, unusable: Collection[Device]) -> None:
    """Ask Ray what it has free, as far as the job may grow.

    Args:
        running: The job.
        unusable: Devices that are to be left or gone: the job may have others for them, and what is
            offered is none of them.
    """
    held = [device for device in running.bundles if device not in unusable]
    wanted = (running.section.max_devices or 0) - len(held)
    running.offered = frozenset(_named(running, unusable)[:wanted] if wanted > 0 else ())
    running.met |= running.offered


def _named(running: Running, unusable: Collection[Device]) -> list[Device]:
    """Name the free devices of nodes like the job's own, those of its own nodes first."""
    free = ray_bundles.free_by_node()
    own = list(dict.fromkeys(device.node for device in running.bundles))
    kinds = {free[node].kind for node in own if node in free}
    found: list[Device] = []
    for node in (*own, *sorted(free.keys() - set(own))):
        if node in free and free[node].kind in kinds:
            count, taken = free[node].count, len(running.bundles)
            names = (Device(node, index) for index in range(count + taken))
            found += [device for device in names if device not in running.bundles][:count]
    return [device for device in found if device not in unusable]


def take(running: Running, devices: Sequence[Device]) -> None:
    """Ask Ray for those of a unit's devices that the job does not hold.

    Raises:
        DevicesMissing: Ray has not as many free any more; nothing has changed.
        WaitTimeout: no process starts there.
    """
    with _lock:
        absent = [device for device in devices if device not in running.bundles]
        taken: dict[Device, Bundle] = {}
        groups: list[tuple[Device, ...]] = []
        try:
            for node in dict.fromkeys(device.node for device in absent):
                there = tuple(device for device in absent if device.node == node)
                taken |= _placed(node, there, running.section.start_s)
                groups.append(there)
        except BaseException:
            for there in groups:
                ray_bundles.removed(taken[there[0]].pg)
            raise
        running.bundles = running.bundles | taken  # others may be reading it
        running.joined += groups


def _placed(node: str, devices: Sequence[Device], timeout_s: float) -> dict[Device, Bundle]:
    group = ray_bundles.placed(node, len(devices))
    try:
        gpus = ray_bundles.gpus_of(group, len(devices), timeout_s)
    except BaseException:
        ray_bundles.removed(group)
        raise
    for device, gpu in zip(devices, gpus, strict=True):
        _log.info("%s has joined: GPU %d of its node", device, gpu)
    return {d: Bundle(group, index, gpus[index]) for index, d in enumerate(devices)}


def give_back(running: Running) -> None:
    """End what waits on devices that have joined and have no unit, and give them back to Ray."""
    with _lock:
        for devices in list(running.joined):
            if any(running.alive.on(device) for device in devices):
                continue
            for key in [key for key in running.ranks if key[1] in devices]:
                ray.kill(running.ranks.pop(key))
            ray_bundles.removed(running.bundles[devices[0]].pg)
            running.bundles = {d: b for d, b in running.bundles.items() if d not in devices}
            running.joined.remove(devices)
