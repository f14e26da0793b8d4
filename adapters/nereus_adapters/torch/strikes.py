"""Strikes: faults that a harness lets hit real seats as a phase of a primitive begins."""

from __future__ import annotations

import os
import signal
import threading

from nereus_adapters.torch.fleet import Pool
from nereus_core.cluster import Device
from nereus_core.errors import OutOfDeviceMemory
from nereus_core.harness import Fault
from nereus_core.phases import Phase
from nereus_core.primitives import Destroy, Primitive, created, ended, touched
from nereus_core.units import UnitMap

_ARM_S = 60.0
"""Longest wait for a seat to take note of a fault; chosen, not measured."""


class Strike:
    """One fault, armed: see `nereus_core.harness.Harness.fail_at`. Thread-safe.

    A seat that has a call to run in the phase is hit inside it, others as the phase begins.
    """

    def __init__(
        self, pool: Pool, fault: Fault, op_index: int, phase: Phase, device: Device | None
    ) -> None:
        self._pool, self._fault, self._device = pool, fault, device
        self._op_index, self._phase = op_index, phase
        self._begun = 0
        self._victim: Primitive | None = None
        self._lock = threading.Lock()

    def at(self, op: Primitive, phase: Phase, units: UnitMap) -> None:
        """Pass the moment at which a phase of a primitive begins."""
        with self._lock:
            if phase is Phase.PREPARE:
                if self._begun == self._op_index:
                    self._victim = op
                self._begun += 1
            if phase is not self._phase or op is not self._victim:
                return
            self._victim = None
        called = set[Device]()
        if not isinstance(op, Destroy):
            taking_part = (*created(op), *(units[u] for u in ended(op)))
            called.update(d for unit in taking_part for d in unit.devices)
        device = self._device or min(called or touched(op, units))
        self._strike(op, phase, device, called=device in called)

    def _strike(self, op: Primitive, phase: Phase, device: Device, *, called: bool) -> None:
        match self._fault:
            case Fault.KILL if called:
                self._arm(device, phase, "kill")
            case Fault.KILL:
                self._pool.kill(device)
            case Fault.HANG:
                # The whole process stands still, its threads too; only SIGKILL ends it.
                os.kill(self._pool.pid(device), signal.SIGSTOP)
            case Fault.REFUSE_MEMORY if called:
                self._arm(device, phase, "refuse")
            case Fault.REFUSE_MEMORY if phase.may_abort:
                raise OutOfDeviceMemory(f"{phase} of {op}", device, 1, 0)
            case Fault.CORRUPT:
                self._arm(device, Phase.TRANSFER, "corrupt")

    def _arm(self, device: Device, phase: Phase, kind: str) -> None:
        self._pool.call(device, "fail_at", phase=str(phase), kind=kind).wait(_ARM_S)
