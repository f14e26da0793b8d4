"""Atoms: devices that every group takes or leaves together. A set of atoms is an integer.

So that a transition at thousands of devices is not ordered device by device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from nereus_core.cluster import Device

Group = tuple[Device, ...]


class Atoms:
    """The coarsest partition of devices of which every group is a union; a bit for each part."""

    def __init__(self, groups: Iterable[Group]) -> None:
        distinct = [group for group in dict.fromkeys(groups) if group]
        self._atoms: list[Group] = distinct
        self.masks = {(): 0, **{group: 1 << n for n, group in enumerate(distinct)}}
        """Atoms of every group."""
        if len(set(chain.from_iterable(distinct))) == sum(map(len, distinct)):
            return  # groups do not meet: they are the atoms
        owner = _refined(distinct)
        self._atoms = _by_atom(owner)
        bits = {owner[atom[0]]: 1 << n for n, atom in enumerate(self._atoms)}
        for group in distinct:
            self.masks[group] = sum([bits[key] for key in set(map(owner.__getitem__, group))])

    def devices(self) -> dict[int, Group]:
        """Devices by atom, as bits from the first up; both in the order in which they were met."""
        return {1 << n: atom for n, atom in enumerate(self._atoms)}


def _refined(groups: Iterable[Group]) -> dict[Device, int]:
    """Split atoms by one group after another; returns the atom of every device."""
    owner: dict[Device, int] = {}
    sizes: list[int] = []
    for group in groups:
        keys = set(map(owner.get, group))
        for key in keys:
            members = group if len(keys) == 1 else [d for d in group if owner.get(d) == key]
            if key is not None:
                if sizes[key] == len(members):
                    continue  # all of it is in the group: it stays one
                sizes[key] -= len(members)
            owner.update(dict.fromkeys(members, len(sizes)))
            sizes.append(len(members))
    return owner


def _by_atom(owner: dict[Device, int]) -> list[Group]:
    found: dict[int, list[Device]] = {}
    for device, key in owner.items():
        found.setdefault(key, []).append(device)
    return list(map(tuple, found.values()))


def bits(mask: int) -> Iterator[int]:
    """Yield the powers of two that a mask consists of."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
