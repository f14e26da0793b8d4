"""Truth: the seconds of a simulated cluster, which a controller has to find out.

It shares with the controller's model the arithmetic of work on shapes (FLOPs, bytes and messages
are facts), and nothing else. Its own are: efficiencies; a factor for every layout of every stage
that no model of classes explains; noise; drift; slow spells of the trace; what transitions take.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from nereus_core.cluster import Device
from nereus_core.cost import CostModel, EfficiencyTable, Lengths
from nereus_core.cost.op_classes import OpClass
from nereus_core.cost.step import makespan, regions
from nereus_core.plan import Plan
from nereus_core.primitives import Primitive
from nereus_core.sim.replay.trace import Trace
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import Job, ModelStage


@dataclass(frozen=True, slots=True)
class TransitionPace:
    """What transitions take, as measured on a backend."""

    primitive_s: float
    """Of every primitive beside its bytes: groups made, calls to seats and back."""
    link_efficiency: float
    """Part of a link's peak that a transfer of state reaches."""
    source: str


@dataclass(frozen=True, slots=True)
class Truth:
    """Immutable; the same seed gives the same seconds."""

    efficiencies: Mapping[OpClass, float]
    """Achieved / peak; a class that is absent has the prior of the controller's own model."""
    transition: TransitionPace
    seed: int = 0
    misfit: float = 0.065
    """Deviation of the log factor of each layout of each stage. Source: five-fold error of a model
    of classes on vTrain's measured multi-node plans."""
    noise: float = 0.03
    """Deviation of the log of a stage's seconds from step to step; chosen, near the scatter of
    update seconds per token in a verl run."""
    drift: float = 0.1
    """Most that a stage's log seconds wander in a slow wave over the run; chosen."""
    between_s: float = 2.0
    """Rewards and advantages between stages. Source: verl log, 1.5 s + 0.2 s per step."""
    fragmentation: float = 1.03
    """Peak memory over what tensors need; chosen, not measured."""
    _period_steps: float = field(default=150.0, repr=False)

    def model(self, job: Job) -> CostModel:
        """Work on this job's shapes at the true efficiencies, before layouts' own factors."""
        moved = dict.fromkeys(
            (OpClass.P2P_INTRA, OpClass.P2P_INTER, OpClass.HOST), self.transition.link_efficiency
        )
        return CostModel(job, EfficiencyTable.prior(job.cluster, {**self.efficiencies, **moved}))

    def stage_factor(self, stage: ModelStage, layout: object, step: int) -> float:
        """What no model of classes explains, times noise and drift."""
        own = self._normal("misfit", stage, layout) * self.misfit
        noise = self._normal("noise", stage, step) * self.noise
        phase = 2 * math.pi * self._uniform("phase", stage)
        wave = self.drift * math.sin(2 * math.pi * step / self._period_steps + phase)
        return math.exp(own + noise + wave)

    def step(
        self, job: Job, plan: Plan, lengths: Lengths, step: int, trace: Trace
    ) -> tuple[float, dict[ModelStage, float]]:
        """Seconds of a step, and of its stages."""
        cost = self.model(job).step(plan, lengths)
        stage_s = {
            s: t * self.stage_factor(s, plan[s].layout, step) * trace.factor(s, step)
            for s, t in cost.stage_s.items()
        }
        busy_s = {s: t + cost.sync_s.get(s, 0.0) for s, t in stage_s.items()}
        total_s, _ = makespan(job.workload, busy_s, regions(plan))
        return total_s + self.between_s, stage_s

    def peak_bytes(self, job: Job, plan: Plan, lengths: Lengths) -> dict[Device, int]:
        """Peak memory by device."""
        need = self.model(job).memory(plan, lengths)
        return {d: round(b * self.fragmentation) for d, b in need.items()}

    def primitive_s(
        self, job: Job, op: Primitive, units: UnitMap, parked: Container[UnitId]
    ) -> float:
        """Seconds of one primitive."""
        return self.model(job).primitive(op, units, parked).mean_s + self.transition.primitive_s

    def _uniform(self, *what: object) -> float:
        return random.Random(f"{self.seed} {' '.join(map(str, what))}").random()

    def _normal(self, *what: object) -> float:
        return random.Random(f"{self.seed} {' '.join(map(str, what))}").gauss(0, 1)
