"""What an engine leaves behind when it is killed, and how its processes are ended.

SGLang ends its own processes with SIGKILL too, and does not clean up after them. Source: sglang
0.5.23 srt/utils/stale_shm_cleanup.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Collection
from pathlib import Path

from nereus_core.errors import WaitTimeout

SHARED_MEMORY = Path("/dev/shm")
"""Where SGLang makes files."""
_CLOSE_S = 10.0
"""A killed process is gone in far less; chosen, not measured."""
_LOOK_S = 0.005
"""How often to look whether a killed process is gone; chosen, not measured."""


def end_group(group: int, folder: Path, ranks: Collection[int] = ()) -> None:
    """End an engine's process group, and remove what it left.

    Args:
        group: id of the engine process and its group.
        folder: of its temporary files, after which SGLang was told to name its own.
        ranks: process ids of its ranks, where they are known.

    Raises:
        WaitTimeout: a process is still there; names the engine.
    """
    pids = {*ranks, *members(group)}
    deadline_s = time.monotonic() + _CLOSE_S
    while signalled(group):
        if time.monotonic() > deadline_s:
            awaited = f"processes of engine {folder.name} (group {group}) to end"
            raise WaitTimeout(awaited, _CLOSE_S)
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    names = [f"sglang_loads_{folder.name}_*", *(f"sgl_shm_*_{p}_*" for p in pids)]
    for left in (path for name in names for path in SHARED_MEMORY.glob(name)):
        left.unlink(missing_ok=True)


def members(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
    return found


def signalled(group: int) -> bool:
    """Kill what is left of a process group; False when nothing is."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
