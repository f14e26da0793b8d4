"""Seat: one device's long-lived process, into which shards of units come and go.

`serve` has the loop that runs it; its methods do not know how calls arrive.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nereus_adapters.rollout.weights import Cell
from nereus_adapters.rollout.weights import Piece as RolloutPiece
from nereus_adapters.torch import looks
from nereus_adapters.torch.accountant import Accountant
from nereus_adapters.torch.boxes import read_boxes, write_boxes
from nereus_adapters.torch.crossing import Digests
from nereus_adapters.torch.engine import (
    Batch,
    Generated,
    LossSpec,
    TrainMetrics,
    UnitGroups,
    UnitShard,
    make_unit_groups,
)
from nereus_adapters.torch.faults import FaultKind, Faults
from nereus_adapters.torch.manifest import Piece
from nereus_adapters.torch.shells import Shells
from nereus_adapters.torch.store import open_store
from nereus_adapters.torch.sync import Lane
from nereus_adapters.torch.transfer import Transfer
from nereus_adapters.torch.values import (
    Held,
    Inventory,
    Memory,
    Offer,
    Region,
    SeatPart,
    SeatSettings,
    ShardSpec,
    SyncPart,
    Ways,
)
from nereus_core.state import Slot
from nereus_core.units import UnitId


class Seat:
    """The methods a driver may call. Those that compute are collective over a unit's seats."""

    def __init__(self, settings: SeatSettings) -> None:
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(True)
        # Storage is written in full before it is read; to fill it first costs as much as a copy.
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._secret = bytes.fromhex(settings.secret)
        self._shared = open_store(settings.store, settings.connect_s, self._secret)
        self.store: torch.distributed.Store = self._shared
        self.units: dict[UnitId, UnitShard] = {}
        self.parked: dict[UnitId, UnitShard] = {}
        self.accountant = Accountant()
        self._shells = Shells(self.device, self.accountant.storage)
        self.faults = Faults(self.accountant)
        self._groups: dict[UnitId, UnitGroups] = {}
        self._lanes: dict[str, Lane] = {}
        self._transfers: dict[str, Transfer] = {}
        self._committed: set[str] = set()

    # --- Units --------------------------------------------------------------------------------

    def warm(self, specs: Sequence[ShardSpec]) -> None:
        """Import and compile what the first shard of a model needs: once a job, not a move."""
        for spec in specs:
            self._shells.take_back(self._shells.build(spec))

    def build(self, unit: UnitId, spec: ShardSpec) -> None:
        """Build a shard with its start-up weights."""
        shard = self._shells.build(spec)
        shard.load(spec.source.folder)
        self.accountant.take(shard.resident_bytes())
        self.units[unit] = shard

    def restore(
        self,
        unit: UnitId,
        spec: ShardSpec,
        folder: str,
        pieces: tuple[Piece, ...],
        counters: Mapping[str, int | float],
    ) -> None:
        """Build a shard with the state that a checkpoint has."""
        shard = self._shells.build(spec)
        shard.replace(read_boxes(Path(folder), pieces, shard))
        shard.counters.update(counters)
        self.accountant.take(shard.resident_bytes())
        self.units[unit] = shard

    def save(self, unit: UnitId, path: str, regions: tuple[Region, ...]) -> list[Piece]:
        """Write boxes of a shard to a file; returns what is in it once it is on disk."""
        self.faults.at("save")
        return write_boxes(Path(path), self.units[unit], regions)

    def drop(self, unit: UnitId, *, park: bool = False) -> None:
        """Let go of a shard and its memory; parked, its state moves to host memory."""
        self.unlink(unit)
        shard = self.units.pop(unit)
        self.accountant.drop(shard.resident_bytes())
        if park:
            self._to_host(shard)
            self.parked[unit] = shard
        else:
            self._shells.take_back(shard)
        self._free()

    def unload(self, unit: UnitId) -> None:
        """Let go of a shard if it is there."""
        if unit in self.units:
            self.drop(unit)

    def unpark(self, unit: UnitId) -> None:
        """Let go of a parked shard."""
        if unit in self.parked:
            self._shells.take_back(self.parked.pop(unit))
            self._free()

    def _to_host(self, shard: UnitShard) -> None:
        for name in shard.names:
            for slot in shard.slots:
                shard.replace({(slot, name): shard.tensor(slot, name).cpu()})

    def counters(self, unit: UnitId) -> dict[str, int | float]:
        """Return a shard's counters, of a parked one too."""
        return dict({**self.parked, **self.units}[unit].counters)

    def set_counter(self, unit: UnitId, name: str, value: int) -> None:
        """Change a counter, for tests that need state to be wrong."""
        self.units[unit].counters[name] = value

    def digests(self, unit: UnitId) -> dict[str, str]:
        """Return a shard's partial digests."""
        return self.units[unit].digests()

    def sums(self, unit: UnitId) -> dict[str, object]:
        """Return digests of a shard's tensors, and its counters: equal on equal shards."""
        return looks.sums(self.units[unit])

    def publish(self, unit: UnitId, name: str, cells: Sequence[Cell]) -> tuple[RolloutPiece, ...]:
        """Write cells of a shard's weights into a segment of this host, for rollout engines."""
        return looks.published(self.units[unit], name, cells)

    def peek(self, unit: UnitId) -> dict[str, looks.Seen]:
        """Return a shard's tensors with their offsets, for tests; bf16 as its bit pattern."""
        return looks.tensors(self.units[unit])

    def poke(self, unit: UnitId, slot: Slot, name: str, factor: float, term: float) -> None:
        """Change a tensor where it is held, for tests that need state to be wrong."""
        shard = self.units[unit]
        if name in shard.names:
            shard.tensor(slot, name).mul_(factor).add_(term)

    def memory(self, *, reset: bool = False) -> Memory:
        """Return state bytes as counted; ``reset`` starts a new window for the peak."""
        seen = Memory(self.accountant.resident_bytes, self.accountant.peak_bytes)
        if reset:
            self.accountant.reset_peak()
        return seen

    def warm_bytes(self) -> int:
        """Return the bytes of pages that ended state has left here, which hold nothing: measured.

        They are the kernel's whenever anybody needs memory; see `pages`.
        """
        return self.accountant.pages.warm_bytes()

    def measured_bytes(self) -> int:
        """Return the bytes of all distinct storages of tensors that live in this process."""
        return looks.measured_bytes(self.device)

    # --- Groups -------------------------------------------------------------------------------

    def link(
        self, unit: UnitId, *, prefix: str, position: int, num_units: int, timeout_s: float
    ) -> None:
        """Build a shard's groups: a new generation, named by ``prefix``."""
        self.unlink(unit)
        shard = self.units[unit]
        groups = make_unit_groups(
            self.store,
            prefix,
            shard.model,
            shard.layout,
            shard.local_rank,
            unit=position,
            num_units=num_units,
            device=self.device,
            timeout_s=timeout_s,
            secret=self._secret,
        )
        self._groups[unit] = groups
        shard.link(groups)

    def unlink(self, unit: UnitId) -> None:
        """Close a shard's groups."""
        if unit in self._groups:
            self._groups.pop(unit).close()

    def open_lane(self, name: str, part: SyncPart) -> Offer:
        """Begin a lane, which weight synchronization uses again and again."""
        self.close_lane(name)
        self._lanes[name] = Lane(part, self.units, self.device, self.accountant)
        return self._lanes[name].offer()

    def join_lane(self, name: str, ways: Ways) -> None:
        """Learn how weights cross on a lane."""
        self._lanes[name].join(ways, self.store, self._secret)

    def close_lane(self, name: str) -> None:
        """End a lane."""
        if name in self._lanes:
            self._lanes.pop(name).close()

    # --- Transfers ----------------------------------------------------------------------------

    def prepare(self, part: SeatPart) -> Offer:
        """First phase of a primitive."""
        self.faults.at("prepare")
        held = {**self.parked, **self.units}
        transfer = Transfer(part, held, self.device, self.accountant, self._shells)
        self._transfers[part.op] = transfer
        self.accountant.reset_peak()
        return transfer.prepare()

    def transfer(self, op: str, ways: Ways) -> Digests:
        """Second phase: state crosses."""
        try:
            self._transfers[op].meet(ways, self.store, self._secret)
            # After the meeting: a seat that fails here breaks the group, so that no peer waits.
            self.faults.at("transfer")
            return self._transfers[op].transfer(ways, self.faults.spoils)
        except BaseException:
            self._transfers[op].release()
            raise

    def verify(self, op: str, left: Digests) -> None:
        """Third phase: what arrived is what was sent."""
        self.faults.at("verify")
        self._transfers[op].verify(left)

    def commit(self, op: str) -> Memory:
        """Fourth phase: the new shard stands, the old ones are gone; returns the peak."""
        self.faults.at("commit")
        transfer = self._transfers[op]
        part = transfer.part
        shard = transfer.commit()
        for unit in part.ending:
            self.unlink(unit)
            if unit in self.units:
                self._shells.take_back(self.units.pop(unit))
        if part.target is not None and shard is not None:
            self.units[part.target] = shard
        self._committed.add(op)
        return self.memory()

    def release(self, op: str) -> None:
        """Last phase: nothing of the transfer is left."""
        self.faults.at("release")
        self._transfers.pop(op).release()
        self._committed.discard(op)
        self._free()

    def abandon(self, op: str) -> None:
        """Undo everything before commit."""
        if op in self._transfers:
            self._transfers.pop(op).abandon()
            self._free()

    def sync(self, lane: str) -> Digests:
        """Take weights from a training unit, in place."""
        try:
            self.faults.at("sync")
            return self._lanes[lane].cross()
        except BaseException:
            self.close_lane(lane)
            raise

    def synced(self, lane: str, left: Digests, version: int) -> None:
        """Accept them: what arrived is what was sent."""
        self._lanes[lane].accept(left, version)

    # --- Computation --------------------------------------------------------------------------

    def generate(self, unit: UnitId, **kwargs: Any) -> Generated | None:
        """Generate; only local rank 0 returns the responses."""
        found = self._computed(unit, "generate", kwargs)
        return found if self.units[unit].local_rank == 0 else None

    def logprobs(self, unit: UnitId, batch: Batch, micro_batch: int) -> torch.Tensor | None:
        """Score responses; the last stage's first tp rank returns [B, T]."""
        return self._scores(unit, "logprobs", batch, micro_batch)

    def values(self, unit: UnitId, batch: Batch, micro_batch: int) -> torch.Tensor | None:
        """Value responses; as `logprobs`."""
        return self._scores(unit, "values", batch, micro_batch)

    def train(
        self, unit: UnitId, batch: Batch, loss: LossSpec, micro_batch: int
    ) -> tuple[TrainMetrics, int]:
        """Do one optimizer step; returns its metrics and the optimizer steps done so far."""
        kwargs = {"batch": batch, "loss": loss, "micro_batch": micro_batch}
        metrics: TrainMetrics = self._computed(unit, "train", kwargs)
        return metrics, int(self.units[unit].counters["step"])

    def _scores(
        self, unit: UnitId, method: str, batch: Batch, micro_batch: int
    ) -> torch.Tensor | None:
        kwargs = {"batch": batch, "micro_batch": micro_batch}
        found: torch.Tensor | None = self._computed(unit, method, kwargs)
        first = self.units[unit].local_rank % self.units[unit].layout.tp == 0
        return found.cpu() if found is not None and first else None

    def _computed(self, unit: UnitId, method: str, kwargs: Mapping[str, Any]) -> Any:
        try:
            self.faults.at(method)
            return getattr(self.units[unit], method)(**kwargs)
        except BaseException:
            # Peers must not wait for a rank that has given up.
            self.unlink(unit)
            raise

    # --- Drivers --------------------------------------------------------------------------------

    def adopted(self, name: str) -> None:
        """Serve another driver: groups of the one before are closed, new ones bear its name."""
        for unit in list(self._groups):
            self.unlink(unit)
        for lane in list(self._lanes):
            self.close_lane(lane)
        self.store = torch.distributed.PrefixStore(name, self._shared)
        self.faults = Faults(self.accountant)

    def inventory(self) -> Inventory:
        """Say what is here."""

        def held(shards: Mapping[UnitId, UnitShard]) -> dict[UnitId, Held]:
            return {
                unit: Held(shard.layout, shard.local_rank, int(shard.counters["step"]))
                for unit, shard in shards.items()
            }

        transfers = {op: op in self._committed for op in self._transfers}
        return Inventory(held(self.units), held(self.parked), transfers)

    # --- Faults -------------------------------------------------------------------------------

    def fail_at(self, phase: str, kind: FaultKind) -> None:
        """Arm a fault for the next arrival at a phase or method."""
        self.faults.arm(phase, kind)

    def reset(self) -> None:
        """Let go of everything: the next job may begin."""
        for lane in list(self._lanes):
            self.close_lane(lane)
        for op in list(self._transfers):
            self.abandon(op)
        for unit in list(self.units):
            self.drop(unit)
        for unit in list(self.parked):
            self.unpark(unit)
        self.accountant = Accountant()
        self._shells = Shells(self.device, self.accountant.storage)
        self.faults = Faults(self.accountant)

    def hello(self) -> int:
        """Answer with the process id: the seat is up."""
        return os.getpid()

    def _free(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        self.accountant.pages.rest()


def once(settings: SeatSettings) -> Callable[[], Seat]:
    """Return a function that makes the seat when first called, and returns it."""

    @functools.cache
    def made() -> Seat:
        seat = Seat(settings)
        gc.freeze()  # what the imports made stays; collections need not look at it
        return seat

    return made
