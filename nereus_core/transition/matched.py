"""What becomes of the units of one model-stage and of its places in a target, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from nereus_core.layout import Layout
from nereus_core.transition.roster import Place


@dataclass(frozen=True, slots=True)
class Held:
    """The units of a model-stage before: what stages that live together have alike."""

    layouts: list[Layout]
    places: list[Place]


@dataclass(slots=True)
class InPlace:
    """Units that become others without leaving their devices: a Split, or a Merge."""

    parents: tuple[int, ...]
    places: tuple[Place, ...]
    layout: Layout
    """Of the units made."""
    is_split: bool
    """Whether it stays on the devices of one parent."""
    bridge_to: Place | None = None
    """Where the unit made grows on to, in the target's layout: its place was held in part only."""
    left: Place = ()
    """Devices of the parents; with those taken, known once the change is chosen."""
    taken: Place = ()
    """Devices of the units made: the same object where these are the same devices."""

    def note_devices(self, units: Held) -> None:
        """Fill in which devices are left and taken."""
        self.left = self.taken = _joined([units.places[parent] for parent in self.parents])
        if sum(map(len, self.places)) != len(self.left):  # within the parents', or around them
            self.taken = _joined(self.places)


@dataclass(frozen=True, slots=True)
class Match:
    """What becomes of every unit and every place of a model-stage; units by position in it."""

    kept: tuple[int, ...]
    in_place: tuple[InPlace, ...]
    new: tuple[Place, ...]
    surplus: tuple[int, ...]


def _joined(places: Sequence[Place]) -> Place:
    """Return the devices of places; those of one are its own tuple."""
    return places[0] if len(places) == 1 else tuple(chain.from_iterable(places))
