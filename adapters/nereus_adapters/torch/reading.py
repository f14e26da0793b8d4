"""Reading: a seat takes state straight out of the memory of another process on its host.

One copy by the kernel (`process_vm_readv`), from where the state lies to where it belongs: no
staging, no shared files, nothing to clean up when either side is killed, and no waiting for the
other side, which may be stopped. The kernel permits it between processes of one user; where it
does not (another user, a namespace, a security policy), `Window.check` says so before anything is
read, and state goes through a group instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from nereus_adapters.torch.engine import PeerLost
from nereus_core.errors import NereusError

CHUNK_BYTES = 256 << 10
"""Read at a time, then digested while it is in the cache. Measured on a core with 2 MiB of L2:
4 MiB is 20% slower (out of that cache), 64 KiB 15% (system calls)."""
_CALLS = 64
"""Whose addresses are written down at once; chosen, not measured."""
_MOST_RUNS = 1024
"""IOV_MAX of Linux."""
_PR_SET_PTRACER = 0x59616D61
"""Of Yama (linux/prctl.h): who may read this process where only its ancestors may."""

Spot = tuple[int, tuple[int, ...]]
"""Where a region lies in its process: address of its first element, strides in bytes."""
Runs = NDArray[np.uint64]
"""[n, 2]: address and length of contiguous bytes, as ``struct iovec`` has them."""


class Unreadable(NereusError):
    """The memory of another seat cannot be read from here; nothing was written."""

    def __init__(self, pid: int, cause: str) -> None:
        self.pid, self.cause = pid, cause
        super().__init__(f"the memory of process {pid} cannot be read: {cause}.")


@dataclass(frozen=True, slots=True)
class Window:
    """A process whose memory others on its host may read."""

    host: str
    """Of the kernel's boot and of process ids; equal where ids mean the same process."""
    pid: int
    token_at: int
    token: bytes
    """Lies at ``token_at`` in that process and in no other, also if its id is used again."""

    def check(self) -> None:
        """Raise Unreadable unless this process can read that one."""
        found = ctypes.create_string_buffer(len(self.token))
        here = np.array([[ctypes.addressof(found), len(found)]], dtype=np.uint64)
        there = np.array([[self.token_at, len(self.token)]], dtype=np.uint64)
        code = copied(self.pid, here, there)
        if code:
            raise Unreadable(self.pid, os.strerror(code))
        if found.raw != self.token:
            raise Unreadable(self.pid, "it is another process than the one that was announced")


@cache
def own_window() -> Window | None:
    """Let other seats read this process; None on a system that has no way to."""
    if _readv() is None:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    host = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    # All seats are children of one driver; an error means that there is no Yama to ask.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)
    token = secrets.token_bytes(16)
    _kept.append(ctypes.create_string_buffer(token, len(token)))
    return Window(host, os.getpid(), ctypes.addressof(_kept[-1]), token)


_kept: list[ctypes.Array[ctypes.c_char]] = []


def spot(view: torch.Tensor) -> Spot:
    """Return where a view lies in this process."""
    each = view.element_size()
    return view.data_ptr(), tuple(each * stride for stride in view.stride())


def fetch(
    window: Window, regions: Iterable[tuple[Spot, torch.Tensor]], summed: xxhash.xxh3_64
) -> None:
    """Copy regions of another process into views of their shapes here, and digest what arrived.

    Raises:
        PeerLost: the other process is gone, or no longer holds that memory.
    """
    batch = _Batch(window, summed)
    for where, view in regions:
        if view.is_contiguous() and where[1] == (here := spot(view))[1]:
            batch.add(where[0], here[0], view.nbytes)
        else:
            batch.read()
            _fetch_runs(window, where, view)
            digest(view, summed)
    batch.read()


class _Batch:
    """Regions that are contiguous on both sides, until they are worth the calls.

    In plain numbers: half of the regions of a model are its norms, for which a call and what
    surrounds it cost more than the copy, so that one call takes several.
    """

    def __init__(self, window: Window, summed: xxhash.xxh3_64) -> None:
        self._window, self._summed = window, summed
        self._remote: list[tuple[int, int]] = []
        self._local: list[tuple[int, int]] = []
        self._calls = [0]
        """Where in these each call begins."""
        self._call_bytes = 0

    def add(self, remote: int, local: int, num_bytes: int) -> None:
        """Add a region by its addresses; reads when that makes a batch."""
        for start in range(0, num_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, num_bytes - start)
            full = self._call_bytes + size > CHUNK_BYTES
            if full or len(self._local) - self._calls[-1] == _MOST_RUNS:
                if len(self._calls) == _CALLS:
                    self.read()
                else:
                    self._calls.append(len(self._local))
                    self._call_bytes = 0
            self._remote.append((remote + start, size))
            self._local.append((local + start, size))
            self._call_bytes += size

    def read(self) -> None:
        """Read what was added, and digest it while it is in the cache."""
        if not self._local:
            return
        here, there = (np.array(runs, dtype=np.uint64) for runs in (self._local, self._remote))
        here_at, there_at = here.ctypes.data, there.ctypes.data
        for first, last in pairwise([*self._calls, len(self._local)]):
            runs, at = self._local[first:last], first * here.strides[0]
            num_bytes = sum(size for _, size in runs)
            code = _call(self._window.pid, here_at + at, there_at + at, len(runs), num_bytes)
            _done(self._window, code)
            for address, size in runs:
                self._summed.update((ctypes.c_char * size).from_address(address))
        self._remote, self._local, self._calls, self._call_bytes = [], [], [0], 0


def _fetch_runs(window: Window, where: Spot, into: torch.Tensor) -> None:
    """Copy a region that is cut into runs on either side."""
    shape, each, here = tuple(into.shape), into.element_size(), spot(into)
    length = _common_run(shape, each, where[1], here[1])
    for remote, local in zip(
        _cut(_runs(shape, where, length, each)), _cut(_runs(shape, here, length, each)), strict=True
    ):
        _read(window, local, remote)


def _read(window: Window, local: Runs, remote: Runs) -> None:
    _done(window, copied(window.pid, local, remote))


def _done(window: Window, code: int) -> None:
    if code:
        cause = f"process {window.pid}: {os.strerror(code)}"
        raise PeerLost("of seats on one host", "a read of state", cause)


def digest(view: torch.Tensor, summed: xxhash.xxh3_64) -> None:
    """Digest a region's elements in order, wherever they lie."""
    whole = view.contiguous()
    summed.update((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))


def _common_run(
    shape: tuple[int, ...], each: int, one: tuple[int, ...], other: tuple[int, ...]
) -> int:
    """Bytes that are contiguous on both sides."""
    length = each
    for size, a, b in zip(reversed(shape), reversed(one), reversed(other), strict=True):
        if size > 1 and not a == b == length:
            break
        length *= size
    return length


def _runs(shape: tuple[int, ...], where: Spot, length: int, each: int) -> Runs:
    """List a region's runs of ``length`` bytes, in order of its elements."""
    address, strides = where
    if length == each * prod(shape):
        return np.array([[address, length]], dtype=np.uint64)
    outer = next(i for i in range(len(shape) + 1) if prod(shape[i:]) * each <= length)
    starts = np.array([address], dtype=np.uint64)
    for size, stride in zip(shape[:outer], strides[:outer], strict=True):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride)
        starts = (starts[:, None] + steps).reshape(-1)
    return np.stack([starts, np.full_like(starts, length)], axis=1)


def _cut(runs: Runs) -> Iterator[Runs]:
    """Yield what one system call takes: some short runs, or a piece of a long one."""
    length = int(runs[0, 1])
    if length > CHUNK_BYTES:
        for address, _ in runs.tolist():
            for start in range(0, length, CHUNK_BYTES):
                size = min(CHUNK_BYTES, length - start)
                yield np.array([[address + start, size]], dtype=np.uint64)
        return
    step = max(1, min(_MOST_RUNS, CHUNK_BYTES // length))
    for first in range(0, len(runs), step):
        yield np.ascontiguousarray(runs[first : first + step])


def copied(pid: int, local: Runs, remote: Runs) -> int:
    """Copy runs out of another process, one call; return 0, or the number of the error."""
    num_bytes = int(local[:, 1].sum())
    return _call(pid, local.ctypes.data, remote.ctypes.data, len(local), num_bytes)


def _call(pid: int, local_at: int, remote_at: int, num_runs: int, num_bytes: int) -> int:
    """Copy runs that lie at addresses of this process, as many here as there, of as many bytes."""
    call = _readv()
    if call is None:
        return errno.ENOSYS
    got = call(pid, local_at, num_runs, remote_at, num_runs, 0)
    if got == num_bytes:
        return 0
    # Less than all: memory is missing from some page on.
    return ctypes.get_errno() if got < 0 else errno.EFAULT


@cache
def _readv() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    found = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if found is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    found.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    found.restype = ctypes.c_ssize_t
    call: Callable[..., int] = found
    return call
