"""Faults on request: a seat dies, raises or hangs at a named phase. For tests of recovery."""

from __future__ import annotations

import os
import signal
import threading
from typing import Literal

from nereus_core.errors import NereusError

FaultKind = Literal["kill", "raise", "hang"]


class FaultInjected(NereusError):
    """The error that a test asked for."""


class Faults:
    """Faults armed on one seat, each for one phase and one use."""

    def __init__(self) -> None:
        self._armed: dict[str, FaultKind] = {}

    def arm(self, phase: str, kind: FaultKind) -> None:
        """Let the next arrival at ``phase`` fail."""
        self._armed[phase] = kind

    def at(self, phase: str) -> None:
        """Arrive at a phase."""
        kind = self._armed.pop(phase, None)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            threading.Event().wait()
        elif kind == "raise":
            raise FaultInjected(f"a fault was injected at phase {phase!r}.")
