"""Plain values that driver and seats exchange about shards and transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nereus_adapters.torch.engine import OptimizerSpec, Storage, UnitShard, plain_storage
from nereus_adapters.torch.reading import Spot, Window
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import Box, Slot
from nereus_core.units import UnitId
from nereus_core.workload import Stage

Region = tuple[str, Box]
"""A box of a logical tensor."""


@dataclass(frozen=True, slots=True)
class SeatSettings:
    """What a seat needs to know of itself."""

    device: str
    """Torch device: ``cpu`` or ``cuda:0`` ..."""
    threads: int
    """Of torch, inside the seat."""
    store: str
    """Address of the store on which seats find one another, see `store.open_store`."""
    secret: str
    """Of the job's groups and store, in hexadecimal: what its seats prove to one another."""
    connect_s: float
    """Longest wait for the store."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the job has it: shapes, Hugging Face configuration, dtype, optimizer."""

    spec: ModelSpec
    hf_config: Mapping[str, Any]
    folder: str
    """Safetensors folder that start-up weights come from."""
    dtype: str
    optimizer: OptimizerSpec | None


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How to build one rank of a unit, without its state."""

    source: ModelSource
    layout: Layout
    local_rank: int
    stage: Stage

    @property
    def kind(self) -> tuple[object, ...]:
        """What two specifications have in common when one's shard serves the other."""
        source = self.source
        model = (source.spec, source.dtype, source.optimizer)
        return (*model, self.layout, self.local_rank, self.stage)

    def build(self, device: torch.device, storage: Storage = plain_storage) -> UnitShard:
        """Build the shard without storage; what it makes itself, it makes with ``storage``."""
        return UnitShard(
            self.source.spec,
            self.source.hf_config,
            self.layout,
            self.local_rank,
            self.stage,
            getattr(torch, self.source.dtype),
            device,
            self.source.optimizer,
            storage,
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """Regions of one slot that travel as one message."""

    source: int
    """Rank in the transfer group."""
    target: int
    slot: Slot
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """The group in which seats exchange buckets that cannot be read from memory."""

    name: str
    rank: int
    size: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """Where others find what they need of a seat."""

    window: Window | None
    """None where its memory cannot be read by others: state on an accelerator."""
    spots: Mapping[int, tuple[Spot, ...]]
    """Rank of the target -> regions of all buckets to it, in order."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where a seat reads what it needs of another one."""

    window: Window
    spots: tuple[Spot, ...]


@dataclass(frozen=True, slots=True)
class Ways:
    """How the buckets of one seat cross."""

    arrivals: Mapping[int, Arrival]
    """Ranks of the seats that it reads from; from others it receives."""
    readers: frozenset[int]
    """Ranks of the seats that read here; to others it sends."""
    meeting: Meeting | None
    """Where seats send and receive; None when nobody needs to."""
    near_readers: int = 1
    """Seats of this seat's host that read at the same time; they share its processors."""


@dataclass(frozen=True, slots=True)
class SeatPart:
    """What one seat does in the move of one primitive."""

    op: str
    rank: int
    """Among the seats that exchange something; -1 when this one does not."""
    sources: tuple[UnitId, ...]
    """Units on this seat that state is read from."""
    ending: tuple[UnitId, ...]
    """Units on this seat that end with the move."""
    target: UnitId | None
    """Unit that this seat gets a shard of."""
    spec: ShardSpec | None
    slots: tuple[Slot, ...]
    kept: tuple[Region, ...]
    """Parts of the new shard that this seat holds already."""
    fetched: tuple[Region, ...]
    """Parts of the new shard that arrive."""
    buckets: tuple[Bucket, ...]
    """Those this seat sends or receives, in the order that holds for all seats."""
    counters: Mapping[str, int | float]
    """Of the new shard."""
    staging_bytes: int | None
    """Most bytes that wait for commit on the seat's device, the rest in host memory."""


@dataclass(frozen=True, slots=True)
class SyncPart:
    """What one seat does when units take weights from training units."""

    rank: int
    """As in a `SeatPart`."""
    sources: tuple[UnitId, ...]
    target: UnitId | None
    kept: tuple[Region, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """State bytes of a seat."""

    resident_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """A shard as its seat knows it."""

    layout: Layout
    local_rank: int
    step: int
    """Optimizer steps done."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a seat holds, for a driver that takes it over."""

    units: Mapping[UnitId, Held]
    parked: Mapping[UnitId, Held]
    transfers: Mapping[str, bool]
    """Those under way -> whether this seat has committed."""
