"""Trainer: what the generate stage needs of the rest of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nereus_adapters.rollout.store import Store
from nereus_core.cluster import Device
from nereus_core.units import UnitMap


class Trainer(Protocol):
    """What the generate stage needs of the rest of the job."""

    @property
    def units(self) -> UnitMap:
        """Units of all stages but generate, those on failed devices left out."""
        ...

    @property
    def failed(self) -> frozenset[Device]:
        """Devices that it knows to be gone."""
        ...

    @property
    def version(self) -> int:
        """Of the newest weights: updates of the actor so far."""
        ...

    def publish(self, store: Store) -> None:
        """Put the newest weights into the store, under `version`."""
        ...

    def fail(self, device: Device) -> None:
        """Forget what lay on a device."""
        ...

    def take_peaks(self) -> Mapping[Device, int]:
        """Return the most bytes of state per device since the last call."""
        ...
