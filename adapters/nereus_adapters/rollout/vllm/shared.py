"""Shared memory that vLLM makes among the ranks of an engine: names go once all have mapped it.

vLLM removes the names of its queues and CPU groups as an engine ends, where the process that made
them lives to do it. Without names nothing is left in ``/dev/shm``, whatever ends a seat.
"""

from __future__ import annotations

from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Where POSIX shared memory lies on Linux."""
_unlink = SharedMemory.unlink


def unlink_mapped() -> list[str]:
    """Remove the names of all shared memory that this process has mapped; return them."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    there = sorted(path for path in paths if path.exists())  # "NAME (deleted)" does not exist
    for path in there:
        path.unlink(missing_ok=True)
    return [path.name for path in there]


def allow_unlinked() -> None:
    """Let vLLM remove a name that has gone, in this process."""

    def unlink(self: SharedMemory) -> None:
        try:
            _unlink(self)
        except FileNotFoundError:  # raised before it is taken off the tracker's list
            resource_tracker.unregister(self._name, "shared_memory")  # type: ignore[attr-defined]

    SharedMemory.unlink = unlink  # type: ignore[method-assign]
