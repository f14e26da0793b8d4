"""Joining: devices that a job did not start with, out of what Ray has free, and back to Ray.

`backend.max_devices` says how many devices the job may hold. What Ray has free beyond those that it
holds is *offered*: plans may use it. An offered device is asked for when a unit comes to it, in a
placement group for all devices of the unit that are on one node, and given back when no unit is on
any device of that group. Its name is the next index of its node that the job does not hold: which
GPU that is, is Ray's choice, made when it is asked for. So a device that somebody has asked back by
its name is kept, without a process: Ray would give the same GPU out again, under another name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import ray

from nereus_adapters import ray_bundles
from nereus_adapters.openrlhf.seats import Bundle
from nereus_core.cluster import Device
from nereus_core.errors import DevicesMissing, NotAtBoundary, WaitTimeout

if TYPE_CHECKING:
    from nereus_adapters.openrlhf.running import Running

_log = logging.getLogger("nereus")
_lock = threading.Lock()
"""Of what is joined and offered; never held while Ray is waited for."""


def look(running: Running, unusable: Collection[Device], draining: Collection[str]) -> None:
    """Ask Ray what it has free, as far as the job may grow.

    Args:
        running: The job.
        unusable: Devices that are to be left or gone: the job may have others for them, and what is
            offered is none of them.
        draining: Nodes that are to go.
    """
    if running.section.max_devices is None:
        return
    held = [device for device in running.bundles if device not in unusable]
    wanted = running.section.max_devices - len(held)
    free = ray_bundles.free_by_node()
    with _lock:
        for node in [n for n, count in running.refused.items() if _count(free, n) != count]:
            del running.refused[node]
        there = {n: one for n, one in free.items() if n not in {*draining, *running.refused}}
        own = {device.node for device in running.bundles}
        kinds = {one.kind for node, one in free.items() if node in own}
        named = [d for d in _named(running, there, kinds) if d not in unusable]
        running.offered = frozenset(named[:wanted] if wanted > 0 else ())
        known = running.met | running.offered  # nodes may come under ever new addresses
        running.met = frozenset(device for device in known if device.node in free)


def _count(free: dict[str, ray_bundles.Free], node: str) -> int:
    return free[node].count if node in free else 0


def _named(
    running: Running, free: dict[str, ray_bundles.Free], kinds: Collection[frozenset[str]]
) -> list[Device]:
    """Name the free devices of nodes of these kinds, those of the job's own nodes first."""
    own = list(dict.fromkeys(device.node for device in running.bundles))
    found: list[Device] = []
    for node in (*own, *sorted(free.keys() - set(own))):
        if node in free and free[node].kind in kinds:
            count, taken = free[node].count, len(running.bundles)
            names = (Device(node, index) for index in range(count + taken))
            found += [device for device in names if device not in running.bundles][:count]
    return found


def take(running: Running, devices: Sequence[Device], stands: Callable[[], bool]) -> None:
    """Ask Ray for those of a unit's devices that the job does not hold.

    Args:
        running: The job.
        devices: Of the unit; no other primitive asks for them at once.
        stands: Whether the boundary is still open that this is for.

    Raises:
        DevicesMissing: Ray has not as many free any more; nothing has changed.
        WaitTimeout: no process starts there.
        NotAtBoundary: it took so long that the boundary has ended.
    """
    taken: dict[Device, Bundle] = {}
    groups: list[tuple[Device, ...]] = []
    absent = [device for device in devices if device not in running.bundles]
    try:
        for node in dict.fromkeys(device.node for device in absent):
            there = tuple(device for device in absent if device.node == node)
            taken |= _placed(running, node, there)
            groups.append(there)
        with _lock:
            if groups and not stands():
                raise NotAtBoundary(f"Ray gave {', '.join(map(str, absent))} so late that it was")
            running.bundles = running.bundles | taken  # others may be reading it
            running.joined += groups
    except BaseException:
        for there in groups:
            ray_bundles.removed(taken[there[0]].pg)
        raise
    for device in taken:
        gpu = taken[device].gpu
        _log.warning("%s has joined the job: it is GPU %d of its node", device, gpu)


def _placed(running: Running, node: str, devices: Sequence[Device]) -> dict[Device, Bundle]:
    """Have Ray place a group; what cannot be had is not offered again before something changes."""
    try:
        group = ray_bundles.placed(node, len(devices))
        try:
            gpus = ray_bundles.gpus_of(group, len(devices), running.section.call_s)
        except BaseException:
            ray_bundles.removed(group)
            raise
    except (DevicesMissing, WaitTimeout):
        count = _count(ray_bundles.free_by_node(), node)
        with _lock:
            running.refused[node] = count
            running.offered = frozenset(d for d in running.offered if d.node != node)
        raise
    return {d: Bundle(group, index, gpus[index]) for index, d in enumerate(devices)}


def give_back(running: Running) -> None:
    """End what waits on devices that have joined and have no unit, and give them back to Ray."""
    with _lock:
        for devices in list(running.joined):
            if any(running.alive.on(d) or d in running.asked_back for d in devices):
                continue
            for key in [key for key in running.ranks if key[1] in devices]:
                ray.kill(running.ranks.pop(key))
            if not ray_bundles.removed(running.bundles[devices[0]].pg):
                continue  # tried again at the next boundary
            running.bundles = {d: b for d, b in running.bundles.items() if d not in devices}
            running.joined.remove(devices)
            _log.warning("%s: given back to Ray", ", ".join(map(str, devices)))
