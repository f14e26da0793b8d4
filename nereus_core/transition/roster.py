"""Units of a transition by number: those there are, and those to be made, as columns.

A transition at a thousand devices makes hundreds of units and is compiled in a millisecond or so:
while it is being decided a unit is a number, and it becomes a `Unit` when somebody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ModelStage

Place = tuple[Device, ...]
"""Devices of one unit, in order of local rank."""


class Roster:
    """Grows while a transition is drafted; no number changes its unit."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.layouts: list[Layout] = []
        self._stages: list[ModelStage] = []
        self._serials: list[int] = []
        self._units: dict[int, Unit] = {}

    def __len__(self) -> int:
        return len(self.places)

    def add(self, stage: ModelStage, units: Sequence[Unit]) -> range:
        """Number units that there are."""
        first = len(self.places)
        self._units.update(enumerate(units, first))
        self.places += [u.devices for u in units]
        self.layouts += [u.layout for u in units]
        self._stages += [stage] * len(units)
        self._serials += [u.id.serial for u in units]
        return range(first, len(self.places))

    def make(
        self, stage: ModelStage, serial: int, layouts: Sequence[Layout], places: Sequence[Place]
    ) -> range:
        """Number units to be made, which take serials from ``serial`` up."""
        first = len(self.places)
        self.places += places
        self.layouts += layouts
        self._stages += [stage] * len(places)
        self._serials += range(serial, serial + len(places))
        return range(first, len(self.places))

    def id(self, number: int) -> UnitId:
        """Name a unit."""
        return UnitId(self._stages[number], self._serials[number])

    def unit(self, number: int) -> Unit:
        """Return a unit as a value, the same one every time."""
        found = self._units.get(number)
        if found is None:
            found = Unit(self.id(number), self.layouts[number], self.places[number])
            self._units[number] = found
        return found
