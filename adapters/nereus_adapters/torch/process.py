"""The process of a seat: a child of ours, or of a driver that died."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from typing import Protocol


class Process(Protocol):
    """What a channel needs of a process; `subprocess.Popen` is one."""

    pid: int
    returncode: int | None

    def kill(self) -> None:
        """End it at once."""
        ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end and return its exit code; raises subprocess.TimeoutExpired."""
        ...


class Adopted:
    """A process that is not our child: its end is seen, its exit code is not."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
