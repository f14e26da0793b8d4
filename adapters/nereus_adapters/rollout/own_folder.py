"""OwnFolder: a process's folder for temporary files, known to be left behind when it has died.

A process that is killed removes nothing. The folder is locked as long as its process lives, and the
kernel lets go of the lock: whoever makes another of the kind on the same host removes those that
nobody holds. A process id would not do: containers that share a folder have ids of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class OwnFolder:
    """Made and locked; folders of the same kind whose processes have died are removed.

    Args:
        kind: what its name begins with, e.g. ``nereus-vllm-``; no other folder's does.
    """

    def __init__(self, kind: str) -> None:
        # Hosts may share a file system whose locks they do not: each looks at its own alone.
        kind = f"{kind}{_boot()}-"
        for left in Path(tempfile.gettempdir()).glob(f"{kind}*"):
            _sweep(left)
        self.path, self._descriptor = _locked(kind)

    def close(self) -> None:
        """Remove it. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _boot() -> str:
    """Return what tells this boot of this kernel from others; proc(5)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]


def _locked(kind: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=kind))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process took it for one that was left
            continue
        with contextlib.suppress(OSError):  # a file system without locks: nobody can sweep there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return path, descriptor
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove a folder, unless its process lives or it is another user's."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # it is held, or nobody can tell
        return
    finally:
        os.close(descriptor)
