"""Units of a transition by number: those there are, and those to be made, as columns.

A transition at a thousand devices makes hundreds of units: while it is being decided a unit is a
number, and it becomes a `Unit` when somebody reads it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

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
        self._units: dict[int, Unit] = {}
        self._made: list[tuple[int, ModelStage, int]] = []
        """First number, model-stage and first serial of units to be made, run by run."""

    def __len__(self) -> int:
        return len(self.places)

    def add(self, units: Sequence[Unit]) -> range:
        """Number units that there are."""
        first = len(self.places)
        self._units.update(enumerate(units, first))
        self.places += [u.devices for u in units]
        self.layouts += [u.layout for u in units]
        return range(first, len(self.places))

    def make(
        self, stage: ModelStage, serial: int, layouts: Sequence[Layout], places: Sequence[Place]
    ) -> None:
        """Number units to be made, which take serials from ``serial`` up."""
        self._made.append((len(self.places), stage, serial))
        self.places += places
        self.layouts += layouts

    def id(self, number: int) -> UnitId:
        """Name a unit."""
        if number in self._units:
            return self._units[number].id
        run = bisect_right(self._made, number, key=itemgetter(0))
        first, stage, serial = self._made[run - 1]
        return UnitId(stage, serial + number - first)

    def unit(self, number: int) -> Unit:
        """Return a unit as a value, the same one every time."""
        if number not in self._units:
            place = self.places[number]
            self._units[number] = Unit(self.id(number), self.layouts[number], place)
        return self._units[number]
