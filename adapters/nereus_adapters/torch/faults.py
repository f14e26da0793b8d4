"""Faults on request: what goes wrong in a seat at a named phase. For tests of recovery."""

from __future__ import annotations

import os
import signal
import threading
from typing import Literal

from nereus_adapters.torch.accountant import Accountant
from nereus_core.errors import NereusError, OutOfDeviceMemory

FaultKind = Literal["kill", "raise", "hang", "refuse", "corrupt"]


class FaultInjected(NereusError):
    """The error that a test asked for."""


class Faults:
    """Faults armed on one seat, each for one phase and one use."""

    def __init__(self, accountant: Accountant) -> None:
        self._accountant = accountant
        self._armed: dict[str, FaultKind] = {}
        self._spoil = False

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
        elif kind == "refuse":
            if phase != "prepare":  # elsewhere no allocation need follow
                raise OutOfDeviceMemory(f"phase {phase}", "this seat", 1, 0)
            self._accountant.refuse_next()
        elif kind == "corrupt":
            self._spoil = True

    def spoils(self) -> bool:
        """Whether the bucket that has just arrived is to be changed; once."""
        spoil, self._spoil = self._spoil, False
        return spoil
