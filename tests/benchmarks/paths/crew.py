"""Crew: processes like seats (same environment, threads and state), in which paths are run.

They are not the seats of the job, so that nothing of a path comes into the product; they hold the
same tensors, under the same memory settings, one process per device. Memory that a path lets go
stays with its process, as seats keep theirs: a path that is run again finds it *warm*. Before a
*cold* run all of it is given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash
from paths.role import Role

from nereus_adapters.torch.accountant import HUGE_PAGES
from nereus_adapters.torch.engine import Group, make_group
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import TRAIN_SLOTS, unit_shards

TIMEOUT_S = 300.0
GIVEN_BACK_S = 3.0
"""After which pages that were freed are cold: the host of a virtual machine with free page
reporting (Linux: page_reporting.c, PAGE_REPORTING_DELAY, 2 s) has taken them back."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Of glibc's mallopt (malloc.h)."""
Seat = tuple[Layout, int] | None
"""Layout of a unit and the local rank of it that a process holds; or nothing."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Where units are before and after."""

    name: str
    before: tuple[Seat, ...]
    after: tuple[Seat, ...]

    def lower_bound(self, model: ModelSpec) -> int:
        """Bytes that processes need and do not hold."""
        return 12 * sum(
            box.num_elements
            for old, new in zip(self.before, self.after, strict=True)
            for name, box in _boxes(model, new).items()
            if name not in _boxes(model, old)
        )


def _boxes(model: ModelSpec, seat: Seat) -> Mapping[str, Any]:
    return {} if seat is None else unit_shards(model, seat[0])[seat[1]]


@dataclass(frozen=True, slots=True)
class Report:
    """What a path cost."""

    seconds: float
    moved_bytes: int
    peak_bytes: int
    """Sum over the processes of resident memory at its highest, above what was there before; of a
    warm run without what was kept."""
    cpu_s: float
    """Processor seconds of all processes: what it costs whatever else the machine does."""
    marks: dict[str, float]
    """Seconds of each part, of its slowest rank."""


class Crew:
    """Some processes that hold a scenario's state and run paths one after another."""

    def __init__(self, model: ModelSpec, scenario: Scenario) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nereus-paths-"))
        self._memory = Path(tempfile.mkdtemp(prefix="nereus-paths-", dir="/dev/shm"))
        os.environ.update(HUGE_PAGES)
        size = len(scenario.before)
        context = multiprocessing.get_context("spawn")
        store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True
        )
        self._store = store
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, rank, size, store.port, model, scenario), daemon=True
            )
            process.start()
            self._ends.append(ours)
            self._processes.append(process)
        self._all([("ready",)] * size)

    def run(self, name: str, *, cold: bool) -> Report:
        """Run one path on all ranks; raises RuntimeError when state is not what it should be."""
        if cold:
            self._all([("give back",)] * len(self._ends))
            time.sleep(GIVEN_BACK_S)
        disk, memory = self._folder / name, self._memory / name
        for folder in (disk, memory):
            folder.mkdir()
        try:
            self._all([("begin", name, disk, memory)] * len(self._ends))
            start_s = time.perf_counter()
            answers = self._all([("go",)] * len(self._ends))
            seconds = time.perf_counter() - start_s
            self._all([("check", name != "copying")] * len(self._ends))
        finally:
            for folder in (disk, memory):
                shutil.rmtree(folder)
        marks: dict[str, float] = {}
        for answer in answers:
            for part, part_s in answer["marks"].items():
                marks[part] = max(part_s, marks.get(part, 0.0))
        moved, peak = (sum(a[k] for a in answers) for k in ("moved_bytes", "peak_bytes"))
        return Report(seconds, moved, peak, sum(a["cpu_s"] for a in answers), marks)

    def close(self) -> None:
        """End the processes and remove what they wrote."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        for folder in (self._folder, self._memory):
            shutil.rmtree(folder, ignore_errors=True)

    def _all(self, messages: Sequence[object]) -> list[Any]:
        for end, message in zip(self._ends, messages, strict=True):
            end.send(message)
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(TIMEOUT_S):
                raise RuntimeError(f"rank {rank} did not answer within {TIMEOUT_S:g} s")
            answers.append(end.recv())
        if failed := [a for a in answers if isinstance(a, str)]:
            raise RuntimeError(failed[0])
        return answers


@contextlib.contextmanager
def crew(model: ModelSpec, scenario: Scenario) -> Iterator[Crew]:
    """Start a crew and end it."""
    made = Crew(model, scenario)
    try:
        yield made
    finally:
        made.close()


def _work(
    end: Connection, rank: int, size: int, port: int, model: ModelSpec, scenario: Scenario
) -> None:
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)):
        libc.mallopt(option, value)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(size)
    )
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = make_group(store, "paths", rank, size, torch.device("cpu"), TIMEOUT_S)
    held = _filled(model, scenario.before[rank])
    role = None
    while (message := end.recv()) is not None:
        try:
            if message[0] == "begin":
                role = _role(rank, group, model, scenario, dict(held), message[2], message[3])
                move = importlib.import_module(f"paths.{message[1]}").path
                gc.collect()
                before = _resident()
                _reset_peak()
            elif message[0] == "go":
                assert role is not None
                begin_s = time.process_time()
                move(role)
                end.send(
                    {
                        "moved_bytes": role.moved_bytes,
                        "peak_bytes": _resident("VmHWM") - before,
                        "cpu_s": time.process_time() - begin_s,
                        "marks": role.marks,
                    }
                )
                continue
            elif message[0] == "give back":
                gc.collect()
                libc.malloc_trim(0)
            elif message[0] == "check":
                assert role is not None
                if message[1]:
                    _check(role)
                role = None
                gc.collect()
            end.send(None)
        except BaseException:
            end.send(traceback.format_exc())


def _filled(model: ModelSpec, seat: Seat) -> dict[str, torch.Tensor]:
    """Fill what a process holds before; the same values on every rank that holds them."""
    return {
        f"{slot}/{name}": torch.rand(
            box.shape, generator=torch.Generator().manual_seed(hash_of(f"{slot}/{name}"))
        )
        for slot in TRAIN_SLOTS
        for name, box in _boxes(model, seat).items()
    }


def hash_of(key: str) -> int:
    """Return a seed for a key, the same in every process."""
    return int(xxhash.xxh3_64(key.encode()).intdigest() % 2**62)


def _role(
    rank: int,
    group: Group,
    model: ModelSpec,
    scenario: Scenario,
    held: dict[str, torch.Tensor],
    disk: Path,
    memory: Path,
) -> Role:
    whole = unit_shards(model, Layout(1, 1))[0]

    def ranks(seats: tuple[Seat, ...], name: str) -> tuple[int, ...]:
        return tuple(r for r, seat in enumerate(seats) if name in _boxes(model, seat))

    keys = [(f"{slot}/{name}", name) for name in whole for slot in TRAIN_SLOTS]
    mine = _boxes(model, scenario.after[rank])
    return Role(
        rank=rank,
        group=group,
        state=held,
        needed={key: tuple(mine[name].shape) for key, name in keys if name in mine},
        shapes={key: tuple(whole[name].shape) for key, name in keys},
        holders={key: ranks(scenario.before, name) for key, name in keys},
        needers={key: ranks(scenario.after, name) for key, name in keys},
        disk=disk,
        memory=memory,
    )


def _check(role: Role) -> None:
    """Compare every tensor with what it is everywhere."""
    for key, shape in role.needed.items():
        found = role.state[key]
        wanted = torch.rand(shape, generator=torch.Generator().manual_seed(hash_of(key)))
        if not torch.equal(found, wanted):
            raise RuntimeError(f"rank {role.rank}: {key} is not what was moved")


def _resident(what: str = "VmRSS") -> int:
    """Resident bytes of this process, now or at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(what + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {what} in /proc/self/status")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
