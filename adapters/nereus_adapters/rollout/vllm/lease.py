"""Leases: how the seat that leads an engine works the seats that follow it.

A seat holds at most one rank. The leading seat runs rank 0 itself; each following seat is reached
by a connection that lives as long as its lease: when it ends, for whatever reason, the seat frees
its rank and is there for the next engine. Calls on one connection are answered in order.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from nereus_core.errors import WaitTimeout

# vLLM freezes its heap when an engine has started, and thaws it when the process is to end. This
# process stays: what its imports made is frozen once, and an engine's objects never are.
freeze = gc.freeze
gc.freeze = gc.unfreeze = lambda: None
# CPUWorker.init_device puts a function that refuses in its place, for a process that ends with it.
_set_num_threads = torch.set_num_threads

base_bytes = 0
"""Resident bytes of this process before its first engine; set by the seat."""


class Rank:
    """One rank of an engine in this process."""

    def __init__(
        self, rank: int, all_kwargs: list[dict[str, Any]], env: Mapping[str, str | None]
    ) -> None:
        torch.set_num_threads = _set_num_threads
        set_environment(env)
        # vLLM adds an engine's extension to the worker's class for good; the next may have another.
        config = all_kwargs[rank]["vllm_config"].parallel_config
        self._class: type = resolve_obj_by_qualname(config.worker_cls)
        self._bases = self._class.__bases__
        self._wrapper: WorkerWrapperBase | None = WorkerWrapperBase(rank, rank)
        self._wrapper.init_worker(all_kwargs)

    def run(self, method: str | bytes | Callable[..., object], args: Any, kwargs: Any) -> Any:
        """Run a method of the worker and return its result, computed to the end."""
        result = run_method(self._wrapper, method, args, kwargs)
        return result.get_output() if hasattr(result, "get_output") else result

    def free(self) -> None:
        """End the rank; memory and process groups are gone when this returns."""
        wrapper, self._wrapper = self._wrapper, None
        try:
            if wrapper is not None and hasattr(wrapper, "worker"):
                wrapper.shutdown()
        finally:
            del wrapper
            self._class.__bases__ = self._bases
            # Keeps every layer that was ever reloaded: its values refer to its weak keys (0.32).
            LAYERWISE_INFO.clear()
            cleanup_dist_env_and_memory()
            gc.collect()


def measured_bytes() -> int:
    """Bytes of all model parameters that live in this process, whoever holds them.

    On a CPU vLLM packs the weights of linear layers into the memory of its kernels and empties the
    parameter; such a weight counts with the size it was packed from.
    """
    modules = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
    storages: dict[int, int] = {}
    packed = 0
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if parameter.numel():
                storage = parameter.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            elif hasattr(module, "input_size_per_partition"):
                rows, columns = module.output_size_per_partition, module.input_size_per_partition
                packed += rows * columns * parameter.element_size()
    return sum(storages.values()) + packed


def set_environment(env: Mapping[str, str | None]) -> None:
    """Set variables of this process; None unsets one that an engine before may have had."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Follower:
    """The following seat's side: runs what its leader sends."""

    def __init__(self, leader: Connection) -> None:
        self.leader = leader
        self._rank: Rank | None = None

    def serve_one(self) -> bool:
        """Run one call; returns False when the lease has ended."""
        try:
            op, wanted, content = cloudpickle.loads(self.leader.recv_bytes())
        except (EOFError, OSError):
            self.end()
            return False
        try:
            value = self._do(op, content)
            reply = (True, value if wanted else None)
        except BaseException:
            reply = (False, traceback.format_exc())
        try:
            self.leader.send_bytes(cloudpickle.dumps(reply))
        except OSError:
            self.end()
            return False
        return True

    def _do(self, op: str, content: Any) -> Any:
        if op == "init":
            self._rank = Rank(*content)
            return os.getpid()
        if op == "free":
            self._free()
            return None
        assert self._rank is not None
        return self._rank.run(*content)

    def _free(self) -> None:
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.free()

    def end(self) -> None:
        """Free the rank and the connection."""
        self.leader.close()
        self._free()


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that was sent to a follower."""

    peer: Peer
    done: bool = False
    ok: bool = False
    value: Any = None

    def result(self, timeout_s: float) -> Any:
        """Wait for the answer.

        Raises:
            WaitTimeout: the follower did not answer; names it.
            RuntimeError: what it raised, with its traceback.
        """
        self.peer.read_until(self, timeout_s)
        if not self.ok:
            raise RuntimeError(f"{self.peer.name} failed:\n{self.value}")
        return self.value


@dataclass(slots=True, eq=False)
class Peer:
    """The leading seat's side of one lease."""

    name: str
    connection: Connection
    _open: deque[Ticket] = field(default_factory=deque)

    def call(self, op: str, content: Any, *, wanted: bool = True) -> Ticket:
        """Send a call; its answer comes without a value unless that is wanted."""
        self.connection.send_bytes(cloudpickle.dumps((op, wanted, content)))
        ticket = Ticket(self)
        self._open.append(ticket)
        return ticket

    def read_until(self, ticket: Ticket, timeout_s: float) -> None:
        """Read answers, in order, up to that of a ticket."""
        while not ticket.done:
            if not self.connection.poll(timeout_s):
                raise WaitTimeout(f"{self.name} to answer its leader", timeout_s)
            self._read_one()

    def read_ready(self) -> None:
        """Read the answers that have come, of calls whose tickets nobody keeps.

        Somebody has to: a follower whose answers fill its socket waits there, and all ranks for it.

        Raises:
            RuntimeError: what one of the calls raised, with its traceback.
        """
        while self._open and self.connection.poll(0):
            self._read_one().result(0)

    def _read_one(self) -> Ticket:
        ok, value = cloudpickle.loads(self.connection.recv_bytes())
        first = self._open.popleft()
        first.done, first.ok, first.value = True, ok, value
        return first

    def close(self) -> None:
        """End the lease."""
        self.connection.close()
