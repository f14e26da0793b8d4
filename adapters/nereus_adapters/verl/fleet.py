"""Fleet: the worker processes of a verl job by device, and those that it may still start."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl import rebuild
from nereus_adapters.verl.bundles import Bundle, Bundles, pool_over, runs
from nereus_adapters.verl.limits import limited
from nereus_core.cluster import Device


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker process."""

    worker: Any
    name: str | None
    """As Ray knows the actor."""
    own: bool = False
    """Whether Nereus started it."""


class Fleet:
    """Worker processes by device; all that is done to one has a timeout.

    Args:
        trainer: verl's trainer.
        devices: Of its worker group, by rank.
        bundles: Of the job's devices.
        timeout_s: For processes to start, stop and answer.
    """

    def __init__(
        self, trainer: Any, devices: Iterable[Device], bundles: Bundles, timeout_s: float
    ) -> None:
        self._trainer, self._timeout_s, self.bundles = trainer, timeout_s, bundles
        group = trainer.actor_rollout_wg
        names = group.worker_names or [None] * len(group.workers)
        self._seats = {
            device: Seat(worker, name)
            for device, worker, name in zip(devices, group.workers, names, strict=True)
        }
        self.dead: set[Device] = set()
        """Devices whose process is known to have ended."""
        self._prefix = group.name_prefix
        self._numbers = itertools.count(1)

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
        """Start processes on devices that have none, those of a node side by side where they can.

        Which accelerator of a node a device stands for is Ray's choice, made here. Primitives on
        common devices do not run at once; others may start processes meanwhile.

        Raises:
            DevicesMissing: Ray has not as many free devices.
            WaitTimeout, SeatDead: they did not come up.
        """
        absent = [d for d in devices if d not in self._seats]
        if not absent:
            return
        fresh: dict[Device, Seat] = {}
        try:
            for node in dict.fromkeys(device.node for device in absent):
                fresh |= self._side_by_side([d for d in absent if d.node == node])
            known = call_all(
                {device: seat.worker for device, seat in list(self._seats.items())[:1]},
                rebuild.recipe,
                awaited="the configuration of verl's engines",
                timeout_s=self._timeout_s,
            )
            workers = {device: seat.worker for device, seat in fresh.items()}
            for function, args in ((rebuild.park, ()), (rebuild.adopt, tuple(known.values()))):
                call_all(
                    workers,
                    function,
                    *args,
                    awaited="new worker processes",
                    timeout_s=self._timeout_s,
                )
        except BaseException:
            self._end(fresh)
            raise
        self._seats |= fresh

    def _side_by_side(self, devices: Sequence[Device]) -> dict[Device, Seat]:
        """Start processes of one node: those of neighboring bundles in one group."""
        held = self.bundles.hold(devices, self)
        found: dict[Device, Seat] = {}
        try:
            for run in runs(held):
                found |= self._started_in({device: held[device] for device in run})
        except BaseException:
            self._end(found)
            self.bundles.let_go([d for d in devices if d not in found], self)
            raise
        return found

    def _started_in(self, bundles: Mapping[Device, Bundle]) -> dict[Device, Seat]:
        from verl.single_controller.ray.base import RayWorkerGroup

        name = f"{self._prefix}_{next(self._numbers)}"

        def started() -> Any:  # verl waits without a limit for an address
            return RayWorkerGroup(
                resource_pool=pool_over(list(bundles.values()), name),
                ray_cls_with_init=self._trainer.actor_rollout_wg.ray_cls_with_init,
                device_name=self._trainer.config.trainer.device,
            )

        group = limited(started, "new worker processes to be placed", self._timeout_s)
        return {
            device: Seat(worker, name, own=True)
            for device, worker, name in zip(bundles, group.workers, group.worker_names, strict=True)
        }

    def leaving(self, kept: Collection[Device]) -> list[Device]:
        """Name the devices whose processes Nereus started and nobody uses any more."""
        return [d for d, seat in self._seats.items() if seat.own and d not in kept]

    def release(self, kept: Collection[Device]) -> None:
        """End the processes that are leaving, and give their devices back to Ray."""
        self._end({device: self._seats[device] for device in self.leaving(kept)})

    def _end(self, seats: Mapping[Device, Seat]) -> None:
        for device, seat in seats.items():
            ray.kill(seat.worker)
            self._seats.pop(device, None)
        self.bundles.let_go(list(seats), self)
