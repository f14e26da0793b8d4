"""Seat: one device's long-lived process, into which shards of units come and go.

Started as ``python -m nereus_adapters.torch.seat FD``; FD is an inherited pipe to the driver.
A thread reads calls, the main thread runs them one after another. When the driver is gone the
pipe ends, and so does the seat, whatever it was doing.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from nereus_adapters.torch.accountant import Accountant
from nereus_adapters.torch.engine import (
    Batch,
    Generated,
    Group,
    LossSpec,
    TrainMetrics,
    UnitGroups,
    UnitShard,
    make_group,
    make_unit_groups,
)
from nereus_adapters.torch.faults import FaultKind, Faults
from nereus_adapters.torch.sync import synchronize
from nereus_adapters.torch.transfer import Transfer
from nereus_adapters.torch.values import (
    Meeting,
    Memory,
    SeatPart,
    SeatSettings,
    ShardSpec,
    SyncPart,
)
from nereus_adapters.torch.wire import Call, Failure, Reply, receive, send_value
from nereus_core.errors import NereusError
from nereus_core.state import Slot
from nereus_core.units import UnitId


class Seat:
    """The methods a driver may call. Those that compute are collective over a unit's seats."""

    def __init__(self, settings: SeatSettings) -> None:
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(True)
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.store = torch.distributed.TCPStore(
            settings.store_host,
            settings.store_port,
            is_master=False,
            timeout=timedelta(seconds=settings.connect_s),
        )
        self.units: dict[UnitId, UnitShard] = {}
        self.parked: dict[UnitId, UnitShard] = {}
        self.accountant = Accountant()
        self.faults = Faults()
        self._groups: dict[UnitId, UnitGroups] = {}
        self._lanes: dict[str, Group] = {}
        self._transfers: dict[str, Transfer] = {}

    # --- Units --------------------------------------------------------------------------------

    def build(self, unit: UnitId, spec: ShardSpec) -> None:
        """Build a shard with its start-up weights."""
        shard = spec.build(self.device)
        shard.load(spec.source.folder)
        self.accountant.take(shard.resident_bytes())
        self.units[unit] = shard

    def drop(self, unit: UnitId, *, park: bool = False) -> None:
        """Let go of a shard and its memory; parked, its state moves to host memory."""
        self.unlink(unit)
        shard = self.units.pop(unit)
        self.accountant.drop(shard.resident_bytes())
        if park:
            self._to_host(shard)
            self.parked[unit] = shard
        del shard
        self._free()

    def unload(self, unit: UnitId) -> None:
        """Let go of a shard if it is there."""
        if unit in self.units:
            self.drop(unit)

    def unpark(self, unit: UnitId) -> None:
        """Let go of a parked shard."""
        self.parked.pop(unit, None)

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

    def peek(self, unit: UnitId) -> dict[str, tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
        """Return a shard's tensors with their offsets, for tests; bf16 as its bit pattern."""
        shard = self.units[unit]
        found = {}
        for name in shard.names:
            for slot in shard.slots:
                tensor = shard.tensor(slot, name).cpu()
                if tensor.dtype is torch.bfloat16:
                    tensor = tensor.view(torch.int16)
                found[f"{slot}/{name}"] = (shard.box(name).offset, tensor.numpy())
        return found

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

    def measured_bytes(self) -> int:
        """Return the bytes of all distinct storages of tensors that live in this process.

        Buffers of modules (rotary frequencies) are left out: they are constants, not state.
        """
        gc.collect()
        things = gc.get_objects()
        constant = {
            buffer.untyped_storage().data_ptr()
            for module in things
            if issubclass(
                type(module), torch.nn.Module
            )  # isinstance asks odd objects for __class__
            for buffer in module._buffers.values()
            if buffer is not None
        }
        sizes = {
            storage.data_ptr(): storage.nbytes()
            for thing in things
            if issubclass(type(thing), torch.Tensor) and thing.device.type == self.device.type
            if (storage := thing.untyped_storage()).data_ptr() not in constant
        }
        return sum(sizes.values())

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
        )
        self._groups[unit] = groups
        shard.link(groups)

    def unlink(self, unit: UnitId) -> None:
        """Close a shard's groups."""
        if unit in self._groups:
            self._groups.pop(unit).close()

    def open_lane(self, name: str, meeting: Meeting) -> None:
        """Join a group that weight synchronisation uses again and again."""
        self.close_lane(name)
        self._lanes[name] = make_group(
            self.store, meeting.name, meeting.rank, meeting.size, self.device, meeting.timeout_s
        )

    def close_lane(self, name: str) -> None:
        """Leave such a group."""
        if name in self._lanes:
            self._lanes.pop(name).close()

    # --- Transfers ----------------------------------------------------------------------------

    def prepare(self, part: SeatPart) -> None:
        """First phase of a primitive."""
        self.faults.at("prepare")
        held = {**self.parked, **self.units}
        transfer = Transfer(part, held, self.device, self.accountant)
        self._transfers[part.op] = transfer
        self.accountant.reset_peak()
        transfer.prepare()

    def transfer(self, op: str) -> None:
        """Second phase: state crosses."""
        try:
            self._transfers[op].meet(self.store)
            # After the meeting: a seat that fails here breaks the group, so that no peer waits.
            self.faults.at("transfer")
            self._transfers[op].transfer()
        except BaseException:
            self._transfers[op].release()
            raise

    def verify(self, op: str) -> None:
        """Third phase: what arrived is what was sent."""
        self.faults.at("verify")
        self._transfers[op].verify()

    def commit(self, op: str) -> Memory:
        """Fourth phase: the new shard stands, the old ones are gone; returns the peak."""
        self.faults.at("commit")
        transfer = self._transfers[op]
        part = transfer.part
        shard = transfer.commit()
        for unit in part.ending:
            self.unlink(unit)
            self.units.pop(unit, None)
        if part.target is not None and shard is not None:
            self.units[part.target] = shard
        return self.memory()

    def release(self, op: str) -> None:
        """Last phase: nothing of the transfer is left."""
        self._transfers.pop(op).release()
        self._free()

    def abandon(self, op: str) -> None:
        """Undo everything before commit."""
        if op in self._transfers:
            self._transfers.pop(op).abandon()
            self._free()

    def sync(self, lane: str, part: SyncPart, version: int) -> None:
        """Take weights from a training unit, in place."""
        try:
            self.faults.at("sync")
            group = self._lanes[lane] if part.crosses else None
            synchronize(part, version, self.units, group, self.device)
        except BaseException:
            self.close_lane(lane)
            raise

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
        self.parked.clear()
        self.accountant = Accountant()
        self.faults = Faults()

    def hello(self) -> int:
        """Answer with the process id: the seat is up."""
        return os.getpid()

    def _free(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def serve(connection: Connection) -> None:
    """Run calls until the driver says goodbye or is gone. The first message is the settings."""
    settings: SeatSettings = receive(connection)
    calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    seat: Seat | None = None
    threading.Thread(target=_read, args=(connection, calls), daemon=True).start()
    while (call := calls.get()) is not None:
        start = time.perf_counter()
        value, failure = None, None
        try:
            if seat is None:
                seat = Seat(settings)
                gc.freeze()  # what the imports made stays; collections need not look at it
            method = getattr(seat, call.method, None)
            if method is None or call.method.startswith("_"):
                raise NereusError(f"a seat has no method {call.method!r}.")
            value = method(**call.kwargs)
        except Exception as error:
            failure = Failure.of(error)
        send_value(connection, Reply(call.id, value, failure, time.perf_counter() - start))


def _read(connection: Connection, calls: queue.SimpleQueue[Call | None]) -> None:
    try:
        while True:
            call = receive(connection)
            calls.put(call)
            if call is None:
                return
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
    # Threads of torch may still hold connections of peers that are gone: do not wait for them.
    os._exit(0)
