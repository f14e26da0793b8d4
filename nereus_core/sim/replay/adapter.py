"""ReplayAdapter: the four primitives over units without state; a transition takes its makespan."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from nereus_core.adapter import Boundary, Fingerprint
from nereus_core.capabilities import Capabilities
from nereus_core.cluster import Device
from nereus_core.gate import Gate
from nereus_core.ledger import Done, Ledger, Standing
from nereus_core.ledger_adapter import LedgerAdapter
from nereus_core.observation import Observation
from nereus_core.phases import Enter, Phase
from nereus_core.plan import Plan, check_plan
from nereus_core.primitives import Destroy, Primitive, apply, touched
from nereus_core.sim.replay.job import ReplayJob
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import Job, ModelStage

_WAIT_S = 60.0
"""Most wall seconds that anything waits for a boundary; nothing does in simulated time."""


class ReplayAdapter(LedgerAdapter):
    """Translates the four primitives to a `ReplayJob`. Implements `nereus_core.adapter.Adapter`.

    Primitives on disjoint devices overlap: each begins when the last of its devices is free, and
    the boundary ends with the last of them.
    """

    name = "replay"

    def __init__(self, running: ReplayJob) -> None:
        super().__init__(Ledger(Capabilities.everything(), clock=running.clock.now_s))
        self._running = running
        self._gate = Gate(_WAIT_S)
        self._lock = threading.RLock()
        self._parked = UnitMap()
        self._free_s: dict[Device, float] = {}
        """When each device is free again, in seconds since the boundary opened."""
        self.transition_s = 0.0
        """Spent in boundaries so far."""
        self.transitions = 0
        """Boundaries in which units changed."""

    def job(self) -> Job:
        """Static facts; devices that are not there count as failed."""
        return self._running.job

    def units(self) -> UnitMap:
        """Units alive now."""
        return self._running.units

    def observe(self) -> Observation:
        """Drain what was seen since the last call."""
        return self._running.seen()

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        """Units hold no state: the digest is of the model's name, the same for every layout."""
        model = self.job().model(self.units()[unit].model_stage)
        digest = hashlib.sha256(model.name.encode()).hexdigest()
        return Fingerprint(unit, {"model": digest}, {"step": self._running.steps})

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        """Hold stages between two steps."""
        held = self._gate.close_on(stages, timeout_s)
        self._free_s = {}
        try:
            yield Boundary(held, self._running.steps)
        finally:
            self.transitions += bool(self._free_s)
            self._running.relink()
            self._gate.open()

    def relink(self, plan: Plan) -> None:
        """Share the batch among the units alive; raises PlanError when they are not the plan's."""
        check_plan(plan, self.job())
        self._running.relink()
        self._parked = UnitMap()

    def _standing(self) -> Standing:
        return Standing(
            self.job(), self.units(), self._gate.held, (), self._parked, self._running.lost
        )

    def _do(self, op: Primitive, units: UnitMap, enter: Enter) -> Done:
        enter(Phase.PREPARE)
        enter(Phase.TRANSFER)
        seconds = self._running.truth.primitive_s(self.job(), op, units, self._parked)
        enter(Phase.VERIFY)
        enter(Phase.COMMIT)
        with self._lock:
            before, devices = self.units(), touched(op, units)
            if isinstance(op, Destroy) and op.park:
                self._parked = UnitMap([*self._parked.values(), before[op.unit]])
            self._running.units = apply(op, before, self._parked)
            end_s = max(self._free_s.get(d, 0.0) for d in devices) + seconds
            longer_s = max(0.0, end_s - max(self._free_s.values(), default=0.0))
            self._free_s |= dict.fromkeys(devices, end_s)
            self.transition_s += longer_s
            self._running.clock.spend(longer_s)
        enter(Phase.RELEASE)
        return Done()
