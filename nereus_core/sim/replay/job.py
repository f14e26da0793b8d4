"""ReplayJob: a run over a trace, in virtual seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from nereus_core.cluster import Device
from nereus_core.cost import Lengths
from nereus_core.errors import UnitLost
from nereus_core.observation import Observation, TokenStats
from nereus_core.plan import Plan, check_plan
from nereus_core.sim.clock import VirtualClock
from nereus_core.sim.replay.trace import Trace
from nereus_core.sim.replay.truth import Truth
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job


class ReplayJob:
    """Steps over a trace; devices leave and come as it says. Implements `Launched` and `Timed`.

    Args:
        job: what runs, on all devices that are ever offered.
        plan: where it runs at first.
        trace: what it goes through.
        truth: what things take.
    """

    def __init__(self, job: Job, plan: Plan, trace: Trace, truth: Truth) -> None:
        self._job = replace(job, num_steps=trace.num_steps)
        self.trace, self.truth = trace, truth
        self.clock = VirtualClock()
        self.steps = 0
        self.units = UnitMap(
            Unit(UnitId(stage, serial), placement.layout, devices)
            for stage, placement in plan.items()
            for serial, devices in enumerate(placement.units)
        )
        self.linked = frozenset(self.units)
        self.lost: set[UnitId] = set()
        self.infeasible_steps = 0
        """Steps whose true peak was larger than a device. They are charged as if they had fitted,
        in favor of whoever runs them."""
        self.handle = self
        self._present = trace.offered(0, job.cluster.devices)
        self._seen: Observation | None = None
        check_plan(plan, self.job)

    @property
    def job(self) -> Job:
        """Static facts; devices that are not there count as failed."""
        devices = self._job.cluster.devices
        return self._job.on(self._job.cluster.without(set(devices) - self.present))

    @property
    def present(self) -> frozenset[Device]:
        """Devices that are there now, those that come with the next step among them."""
        return self._present

    @property
    def draining(self) -> frozenset[Device]:
        """Devices announced to leave before the next step."""
        return self._present - self.trace.offered(self.steps, self._job.cluster.devices)

    @property
    def finished(self) -> bool:
        """Whether the trace has been run through."""
        return self.steps >= self.trace.num_steps

    def clock_s(self) -> float:
        """Virtual seconds since the start."""
        return self.clock.now_s()

    def close(self) -> None:
        """Hold nothing."""

    def step(self) -> Mapping[str, float]:
        """Run the trace's next step.

        Raises:
            UnitLost: devices left under units; nothing was done, and the step is asked for again.
        """
        number = self.steps
        self._leave(self.draining)
        if gone := sorted(self.linked - set(self.units)):
            raise UnitLost(gone, tuple(self.units), "their devices left")
        job, plan = self.job, Plan.of_units(self.units)
        prompts = self.trace.prompts(number, job)
        responses, clipped = self.trace.responses(number, job, self.truth.seed)
        seen = Observation(
            number, 0.0, {}, prompts, responses, {}, self.present, clip_ratio=clipped
        )
        lengths = Lengths.of(seen)
        step_s, stage_s = self.truth.step(job, plan, lengths, number, self.trace)
        peaks = self.truth.peak_bytes(job, plan, lengths)
        self.infeasible_steps += max(peaks.values()) > job.cluster.device_spec.memory_bytes
        self.clock.spend(step_s)
        self._seen = replace(seen, step_s=step_s, stage_s=stage_s, peak_bytes=peaks)
        self.steps += 1
        # What the next step brings is there from this boundary on.
        self._present |= self.trace.offered(self.steps, self._job.cluster.devices)
        return {}

    def seen(self) -> Observation:
        """What was seen since the last call."""
        seen, self._seen = self._seen, None
        nothing = TokenStats.of([])
        seen = seen or Observation(self.steps - 1, 0.0, {}, nothing, nothing, {}, self.present)
        return replace(seen, healthy=self.present, draining=self.draining)

    def relink(self) -> None:
        """Share the batch among the units alive."""
        self.linked = frozenset(self.units)

    def _leave(self, devices: Iterable[Device]) -> None:
        self._present -= frozenset(devices)
        alive = self.units.intact(set(self._job.cluster.devices) - self._present)
        self.lost |= set(self.units) - set(alive)
        self.units = alive
