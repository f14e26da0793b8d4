"""Resident: memory of a process as the kernel counts it; it stands for a device's on a CPU."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def take_peak_bytes(pid: int | str = "self") -> int:
    """Return the most resident bytes of a process since the last call, which begins anew.

    Since its start, where this process may not reset that; 0 for a process that has ended.
    """
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("VmHWM:"):
            with contextlib.suppress(OSError):
                (folder / "clear_refs").write_text("5")  # proc(5): resets the peak resident set
            return int(line.split()[1]) * 1024
    return 0
