"""fitting: what units keep of a device, and whether those beside each other fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus_adapters.verl.facts import WorkerFacts
from nereus_adapters.verl.standing import ROLES
from nereus_adapters.verl.switching import serving
from nereus_core.cluster import Device
from nereus_core.errors import OutOfDeviceMemory
from nereus_core.layout import layer_ranges
from nereus_core.primitives import Primitive, apply, created
from nereus_core.units import Unit, UnitMap
from nereus_core.workload import Job, ModelStage, Stage


@dataclass(frozen=True, slots=True)
class Fitting:
    """Bytes that units keep between steps."""

    job: Job
    elements: Mapping[ModelStage, Mapping[tuple[int, int], int]]
    """Of a stage's parameters under the tp engine: `EngineFacts.elements`."""
    standalone: float | None
    """Share of a device that a rollout's engine takes as it starts and keeps; None where rollouts
    share the trainers' processes."""

    @classmethod
    def of(cls, job: Job, facts: WorkerFacts, standalone: float | None) -> Fitting:
        """Ask the engines of a worker what ranks hold whole."""
        told = {ROLES[engine.role]: engine.elements for engine in facts.engines}
        return cls(
            job, {stage: elements for stage, elements in told.items() if elements}, standalone
        )

    def require(self, op: Primitive, units: UnitMap, linked: UnitMap, parked: UnitMap) -> None:
        """Raise OutOfDeviceMemory unless the states of all units fit where new ones shall lie.

        Args:
            op: What is to be performed.
            units: Those alive.
            linked: Those that the job steps on.
            parked: Those that have ended and are still read from.
        """
        after, capacity = apply(op, units, parked), self.job.cluster.device_spec.memory_bytes
        if self.standalone is not None:  # replicas that have ended serve until the epoch switch
            ending = [u for u in serving(linked).values() if u.id not in after]
            made = {(u.devices, u.layout) for u in created(op) if serves(u)}
            # One that comes back is the one that is there.
            serve_on = [u for u in ending if (u.devices, u.layout) not in made]
            after = after.replace((), serve_on)
        for device in dict.fromkeys(d for unit in created(op) for d in unit.devices):
            need = sum(self.kept_bytes(u, device) for u in after.values() if device in u.devices)
            if need > capacity:
                raise OutOfDeviceMemory(str(op), device, need, capacity)

    def kept_bytes(self, unit: Unit, device: Device) -> int:
        """Bytes that a unit keeps on one of its devices."""
        stage = unit.model_stage
        if serves(unit) and self.standalone is not None:
            return int(self.standalone * self.job.cluster.device_spec.memory_bytes)
        model, (tp, pp) = self.job.model(stage), (unit.layout.tp, unit.layout.pp)
        held = self.elements.get(stage)
        if held is None:
            return self.job.precision.kept_bytes(stage.stage) * (model.num_params // (tp * pp))
        layers = layer_ranges(model.num_layers, pp)[unit.devices.index(device) // tp]
        mine = ((extent, n) for (layer, extent), n in held.items() if layer in layers)
        each = sum(n if extent % tp else n // tp for extent, n in mine)
        return self.job.precision.kept_bytes(stage.stage) * each


def serves(unit: Unit) -> bool:
    """Whether a unit is a replica of the rollout."""
    return unit.model_stage.stage is Stage.GENERATE
