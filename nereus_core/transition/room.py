"""Room: bytes of state on every device while the primitives of a transition go one after another.

Primitives that share a device never overlap, so what a device holds at each of them is settled by
their order alone, whatever runs elsewhere at the time. New shards come to stand beside the old
ones; where that is too much, they are staged in host memory and the old ones go first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain

from nereus_core.cluster import Device
from nereus_core.cost.transition import shared_elements
from nereus_core.errors import Infeasible
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.transition.draft import Node
from nereus_core.transition.roster import Roster
from nereus_core.units import Unit
from nereus_core.workload import Job


@lru_cache(maxsize=1024)
def rank_elements(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Elements of a model that every local rank of a layout holds, per slot."""
    ranks = range(layout.num_devices)
    return tuple(shared_elements(model, (layout, rank), (layout, rank)) for rank in ranks)


def unit_bytes(job: Job, unit: Unit) -> dict[Device, int]:
    """Bytes of state that a unit keeps on each of its devices."""
    stage = unit.model_stage
    each = job.precision.kept_bytes(stage.stage)
    elements = rank_elements(job.model(stage), unit.layout)
    return {device: each * n for device, n in zip(unit.devices, elements, strict=True)}


class Room:
    """What is left on every device."""

    def __init__(self, job: Job, roster: Roster, alive: Iterable[Iterable[int]]) -> None:
        self._job, self._roster = job, roster
        self._capacity = job.cluster.device_spec.memory_bytes
        self._held: dict[Device, int] = {}
        self._sizes: dict[int, dict[Device, int]] = {}
        for unit in chain.from_iterable(alive):
            self._add(unit, 1)

    def blocked(self, node: Node) -> Device | None:
        """Return the first device on which the new shards do not fit beside what is there."""
        for unit in node.made:
            for device, size in self._size(unit).items():
                if self._held.get(device, 0) + size > self._capacity:
                    return device
        return None

    def fits_staged(self, node: Node) -> bool:
        """Whether new shards fit once those that end have gone."""
        gone: dict[Device, int] = {}
        for unit in node.ended:
            for device, size in self._size(unit).items():
                gone[device] = gone.get(device, 0) + size
        return bool(node.ended) and all(
            self._held.get(device, 0) - gone.get(device, 0) + size <= self._capacity
            and self._held.get(device, 0) <= self._capacity
            for unit in node.made
            for device, size in self._size(unit).items()
        )

    def left(self, node: Node) -> int:
        """Bytes left on the fullest device that a primitive makes a shard on."""
        devices = (d for unit in node.made for d in self._roster.places[unit])
        return self._capacity - max(self._held.get(d, 0) for d in devices)

    def take(self, node: Node) -> None:
        """Let a primitive happen."""
        for unit in node.ended:
            self._add(unit, -1)
        for unit in node.made:
            self._add(unit, 1)

    def copy(self) -> Room:
        """Return another room that starts as this one is."""
        other = Room(self._job, self._roster, ())
        other._held, other._sizes = dict(self._held), self._sizes
        return other

    def taken(self, node: Node) -> bool:
        """Let a primitive happen if it fits as it is, staged or not; say whether it did."""
        limit = node.staging_bytes
        if limit is None:
            fits = self.blocked(node) is None
        else:
            fits = self.fits_staged(node) and limit <= self.left(node)
        if fits:
            self.take(node)
        return fits

    def refuse(self, node: Node, device: Device, what: str) -> Infeasible:
        """Say that a unit does not fit on a device."""
        need = max(self._size(unit).get(device, 0) for unit in node.made)
        held = self._held.get(device, 0)
        made = ", ".join(str(self._roster.unit(unit)) for unit in node.made)
        return Infeasible(
            f"{what} {made} puts {need / 2**30:.2f} GiB on {device} beside {held / 2**30:.2f} GiB; "
            f"it has {self._capacity / 2**30:.2f} GiB. Choose a plan that leaves more room there."
        )

    def _size(self, unit: int) -> dict[Device, int]:
        found = self._sizes.get(unit)
        if found is None:
            found = self._sizes[unit] = unit_bytes(self._job, self._roster.unit(unit))
        return found

    def _add(self, unit: int, sign: int) -> None:
        for device, size in self._size(unit).items():
            self._held[device] = self._held.get(device, 0) + sign * size


def is_ample(
    job: Job, before: Sequence[Iterable[Layout]], made: Sequence[Iterable[Layout]]
) -> bool:
    """Whether all that is there before and all that is made fit together on any one device.

    Every stage is charged with its fullest shard of any layout, before and after: no order of the
    primitives can come near the capacity then, and none has to be followed device by device.
    Layouts are given by stage.
    """
    total = 0
    for stage, *both in zip(job.workload.stages, before, made, strict=True):
        each, model = job.precision.kept_bytes(stage.stage), job.model(stage)
        for layouts in both:
            alike = {id(layout): layout for layout in layouts}  # quicker than to hash hundreds
            fullest = (max(rank_elements(model, layout)) for layout in alike.values())
            total += each * max(fullest, default=0)
    return total <= job.cluster.device_spec.memory_bytes
