"""Supply: the devices of a job as they leave and come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nereus_adapters.torch.fleet import Fleet
from nereus_core.cluster import Device
from nereus_core.errors import NereusError
from nereus_core.units import UnitMap


class Supply:
    """Which devices are gone, and which will go once no unit is on them.

    Args:
        devices: all that the job may ever use.
        fleet: starts and ends their seats.
    """

    def __init__(self, devices: Sequence[Device], fleet: Fleet) -> None:
        self._devices, self._fleet = tuple(devices), fleet
        self._retired: frozenset[Device] = frozenset()
        self.draining: frozenset[Device] = frozenset()
        """Devices that will leave once no unit is on them."""

    @property
    def failed(self) -> frozenset[Device]:
        """Devices whose seats are gone."""
        return self._retired | (frozenset(self._devices) - self._fleet.pool.alive)

    def take(self, devices: Iterable[Device], units: UnitMap) -> None:
        """Announce that devices will leave: once no unit is on them, their seats end."""
        self.draining |= self._known(devices) & self._fleet.pool.alive
        self.retire(units)

    def give(self, devices: Iterable[Device]) -> None:
        """Devices are back: start their seats; returns when they are up."""
        back = self._known(devices)
        self._fleet.reap()  # a unit that was on the old seat is not on the new one
        self._fleet.start(sorted(back))
        self._retired -= back
        self.draining -= back

    def retire(self, units: UnitMap) -> None:
        """End the seats of draining devices that no unit is on."""
        for device in sorted(self.draining):
            if not units.on(device):
                self.draining -= {device}
                self._retired |= {device}
                self._fleet.pool.stop(device)

    def _known(self, devices: Iterable[Device]) -> frozenset[Device]:
        wanted = frozenset(devices)
        if unknown := sorted(wanted - set(self._devices)):
            known = ", ".join(map(str, self._devices))
            raise NereusError(f"no device {unknown[0]} in this job; it has {known}.")
        return wanted
