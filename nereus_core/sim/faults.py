"""Faults that strike a simulated job once, as a phase of a primitive begins."""

from __future__ import annotations

import threading

from nereus_core.cluster import Device
from nereus_core.errors import OutOfDeviceMemory, WaitTimeout
from nereus_core.harness import Fault
from nereus_core.phases import Phase
from nereus_core.primitives import Primitive, touched
from nereus_core.sim.job import SimJob
from nereus_core.units import UnitMap

HANG_S = 0.05
"""How long a simulated job waits for a device that hangs; chosen, not measured."""


class Strike:
    """One fault, armed: see `nereus_core.harness.Harness.fail_at`. Thread-safe."""

    def __init__(
        self, job: SimJob, fault: Fault, op_index: int, phase: Phase, device: Device | None
    ) -> None:
        self._job, self._fault, self._device = job, fault, device
        self._op_index, self._phase = op_index, phase
        self._begun = 0
        self._victim: Primitive | None = None
        self._lock = threading.Lock()
        self._let_go = threading.Event()

    def let_go(self) -> None:
        """Strike no more, and let a primitive that hangs go on."""
        self._op_index = -1
        self._let_go.set()

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
        self._strike(op, phase, self._device or min(touched(op, units)))

    def _strike(self, op: Primitive, phase: Phase, device: Device) -> None:
        match self._fault:
            case Fault.KILL:
                self._job.fail(device)
            case Fault.HANG if self._device is None:
                self._let_go.wait()
            case Fault.HANG:
                self._job.fail(device)  # what does not answer in time is not waited for again
                if not self._let_go.wait(HANG_S) and phase.may_abort:
                    raise WaitTimeout(f"{device} in {phase} of {op}", HANG_S)
            case Fault.REFUSE_MEMORY if phase.may_abort:
                raise OutOfDeviceMemory(f"{phase} of {op}", device, 1, 0)
            case Fault.CORRUPT:
                self._job.world.corrupt(op.op_id)
