"""The imaginary framework: replicas whose tensors lie in one dict, trained on a stream of integers.

It stands for verl, OpenRLHF and their like, and knows nothing of Nereus' primitives. Which rows of
a tensor a device holds is said by the layout; here that only decides what counts as its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus_core.cluster import Device
from nereus_core.gate import Gate
from nereus_core.harness import Array, StepResult
from nereus_core.plan import Plan
from nereus_core.state import shard_bytes, slots_of, tensor_rules, unit_shards
from nereus_core.units import Unit, UnitId
from nereus_core.workload import Job, ModelStage, Stage

WAIT_S = 30.0


@dataclass
class Replica:
    """One copy of a model, cut over devices."""

    unit: Unit
    tensors: dict[str, Array]
    """``slot/tensor`` -> array."""
    counters: dict[str, int]

    def copy(self, unit: Unit) -> Replica:
        """Return another copy on other devices, with the slots that its stage keeps."""
        kept = {str(slot) for slot in slots_of(unit.model_stage.stage)}
        tensors = {k: v.copy() for k, v in self.tensors.items() if k.partition("/")[0] in kept}
        return Replica(unit, tensors, dict(self.counters))


class ToyTrainer:
    """A running job."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self.job, self.steps, self.cursor, self.fresh = job, 0, 0, False
        self.gate = Gate(WAIT_S)
        """Where a step, stage by stage, and whoever wants a stage not to run, meet."""
        self.replicas: dict[UnitId, Replica] = {}
        for stage, placement in plan.items():
            for serial, devices in enumerate(placement.units):
                unit = Unit(UnitId(stage, serial), placement.layout, devices)
                self.replicas[unit.id] = self.loaded(unit)

    def loaded(self, unit: Unit) -> Replica:
        """Return a replica with the weights that its model starts with."""
        stage, rng = unit.model_stage, np.random.default_rng(0)
        rules = tensor_rules(self.job.model(stage))
        tensors = {f"param/{r.name}": rng.normal(0, 0.02, r.shape) for r in rules}
        for slot in slots_of(stage.stage)[1:]:
            tensors |= {f"{slot}/{r.name}": np.zeros(r.shape) for r in rules}
        return Replica(unit, tensors, {"step": 0, "weight_version": 0})

    def of(self, stage: ModelStage) -> list[Replica]:
        """Return the replicas of a stage, in the order in which they take slices of a batch."""
        return [self.replicas[u] for u in sorted(self.replicas) if u.model_stage == stage]

    def memory_bytes(self, device: Device) -> int:
        """Return the bytes that lie on a device."""
        return sum(self.shard_bytes(r.unit).get(device, 0) for r in self.replicas.values())

    def shard_bytes(self, unit: Unit) -> dict[Device, int]:
        """Return the bytes of a unit by device."""
        shards = unit_shards(self.job.model(unit.model_stage), unit.layout)
        sizes = [shard_bytes(s, self.job.precision, unit.model_stage.stage) for s in shards]
        return dict(zip(unit.devices, sizes, strict=True))

    def step(self) -> StepResult:
        """Generate, score, train, synchronise weights."""
        with self.gate.step():
            return self._step()

    def _step(self) -> StepResult:
        batch = range(self.cursor, self.cursor + self.job.global_batch)
        losses, norms, versions = {}, {}, {}
        consumed: list[int] = []
        for node in self.job.workload.nodes:
            stage = node.model_stage
            with self.gate.stages(stage):
                replicas = self.of(stage)
                if stage.stage is Stage.GENERATE:
                    versions = {r.unit.id: r.counters["weight_version"] for r in replicas}
                if stage.stage is Stage.TRAIN:
                    cuts = np.array_split(np.asarray(batch), len(replicas))
                    consumed = [int(sample) for part in cuts for sample in part]
                    data = sum(consumed) % 97
                    results = [_update(r, data / 97) for r in replicas]
                    losses[stage.model], norms[stage.model] = results[0]
        for node in self.job.workload.nodes:
            if node.weights_from is not None:
                with self.gate.stages(node.weights_from, node.model_stage, receiving=True):
                    source = self.of(node.weights_from)[0]
                    for replica in self.of(node.model_stage):
                        self.replicas[replica.unit.id] = source.copy(replica.unit)
        self.cursor += self.job.global_batch
        self.steps, self.fresh = self.steps + 1, True
        return StepResult(self.steps - 1, losses, tuple(consumed), versions, norms)


def _update(replica: Replica, data: float) -> tuple[float, float]:
    """Take a step of Adam on a made-up loss; returns loss and gradient norm."""
    replica.counters["step"] += 1
    replica.counters["weight_version"] += 1
    step, loss, squares = replica.counters["step"], 0.0, 0.0
    names = [k.partition("/")[2] for k in replica.tensors if k.startswith("param/")]
    for name in names:
        param, m, v = (replica.tensors[f"{s}/{name}"] for s in ("param", "exp_avg", "exp_avg_sq"))
        grad = param + data
        loss, squares = loss + float((param**2).sum()), squares + float((grad**2).sum())
        m += 0.1 * (grad - m)
        v += 0.001 * (grad**2 - v)
        param -= 0.01 * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return loss, squares**0.5
