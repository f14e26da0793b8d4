"""Fleet: the worker processes of a verl job by device, and those that it may still start."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl import rebuild
from nereus_core.cluster import Device
from nereus_core.errors import DevicesMissing


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker process."""

    worker: Any
    name: str | None
    """As Ray knows the actor."""
    group: Any = None
    """verl's worker group that it was started with, where Nereus started it."""


class Fleet:
    """Worker processes by device; all that is done to one has a timeout.

    Args:
        trainer: verl's trainer.
        devices: Of its worker group, by rank.
        timeout_s: For processes to start, stop and answer.
    """

    def __init__(self, trainer: Any, devices: Iterable[Device], timeout_s: float) -> None:
        self._trainer, self._timeout_s = trainer, timeout_s
        group = trainer.actor_rollout_wg
        names = group.worker_names or [None] * len(group.workers)
        self._seats = {
            device: Seat(worker, name)
            for device, worker, name in zip(devices, group.workers, names, strict=True)
        }
        self.dead: set[Device] = set()
        """Devices whose process is known to have ended."""
        self._prefix = group.name_prefix
        self._started = 0

    def seat(self, device: Device) -> Seat:
        """Return the process on a device."""
        return self._seats[device]

    def workers(self, devices: Iterable[Device]) -> dict[Device, Any]:
        """Return the actors on some devices, in that order."""
        return {device: self._seats[device].worker for device in devices}

    def living(self, devices: Iterable[Device]) -> dict[Device, Any]:
        """Return those of the actors on some devices that are not known to have ended."""
        return self.workers(device for device in devices if device not in self.dead)

    def start(self, devices: Collection[Device]) -> None:
        """Start processes on devices that have none, each in a bundle of its own.

        Which accelerator of a node a device stands for is Ray's choice, made here.

        Raises:
            DevicesMissing: Ray has not as many free devices.
            WaitTimeout, SeatDead: they did not come up.
        """
        absent = [d for d in devices if d not in self._seats]
        if not absent:
            return
        free = int(ray.available_resources().get("GPU", 0))
        if free < len(absent):
            raise DevicesMissing("GPU", len(absent), free)
        from verl.single_controller.ray.base import RayResourcePool, RayWorkerGroup

        old = self._trainer.actor_rollout_wg
        self._started += 1
        pool = RayResourcePool(
            [len(absent)],
            use_gpu=True,
            max_colocate_count=3,  # verl's own pools: room for the rollout beside the trainer
            name_prefix=f"nereus_{self._prefix}_{self._started}",
        )
        group = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=old.ray_cls_with_init,
            device_name=self._trainer.config.trainer.device,
        )
        fresh = dict(zip(absent, group.workers, strict=True))
        known = call_all(
            {device: seat.worker for device, seat in list(self._seats.items())[:1]},
            rebuild.recipe,
            awaited="the configuration of verl's engines",
            timeout_s=self._timeout_s,
        )
        try:
            for function, args in ((rebuild.park, ()), (rebuild.adopt, tuple(known.values()))):
                call_all(
                    fresh,
                    function,
                    *args,
                    awaited="new worker processes",
                    timeout_s=self._timeout_s,
                )
        except BaseException:
            _end(group)
            raise
        for device, name in zip(absent, group.worker_names, strict=True):
            self._seats[device] = Seat(fresh[device], name, group)

    def leaving(self, kept: Collection[Device]) -> list[Device]:
        """Name the devices of groups that Nereus started and nobody uses any more."""
        used = {id(seat.group) for device, seat in self._seats.items() if device in kept}
        return [
            device
            for device, seat in self._seats.items()
            if seat.group is not None and id(seat.group) not in used
        ]

    def release(self, kept: Collection[Device]) -> None:
        """Give the devices that are leaving back to Ray."""
        gone = self.leaving(kept)
        for group in {id(self._seats[d].group): self._seats[d].group for d in gone}.values():
            _end(group)
        for device in gone:
            del self._seats[device]


def _end(group: Any) -> None:
    for worker in group.workers:
        ray.kill(worker)
    for placement in group.resource_pool.pgs:
        with suppress(Exception):  # it goes with the job at the latest
            ray.util.remove_placement_group(placement)
