"""HfTrainer: the rest of an RL job around rollout engines, on a Hugging Face model in this process.

For the conformance harness and the tests: small, real, and with its state cut into units as a
distributed trainer's is. Each unit holds its own copy; a step reads the first unit that is intact,
updates on the whole batch with Adam, and writes every unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from nereus_adapters.rollout.assembling import Arrays, assembled
from nereus_adapters.rollout.store import Store, publish_here
from nereus_core.cluster import Device
from nereus_core.plan import Plan
from nereus_core.state import Box, Shard, Slot, placed, slots_of, tensor_rules
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, ModelStage, Stage

_LEARNING_RATE = 1e-2
"""Large enough that a step shows in every tensor; chosen, not measured."""
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
"""Kingma and Ba 2015, section 2."""
_KL = 0.05
"""Weight of the distance to the reference; chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with its response and reward."""

    id: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    reward: float


class HfTrainer:
    """Implements `nereus_adapters.rollout.source.Trainer`.

    Args:
        job: what runs.
        plan: where units of all stages but generate are.
        folder: with the config.json of the model.
        seed: of its weights.
        max_devices: of the largest engine.
    """

    def __init__(self, job: Job, plan: Plan, folder: Path, *, seed: int, max_devices: int) -> None:
        self._job, self._max_devices = job, max_devices
        self.version = 0
        self._failed: set[Device] = set()
        config = AutoConfig.from_pretrained(folder)
        config.pad_token_id, config.num_labels = 0, 1
        self._models: dict[str, Any] = {}
        for model, spec in job.models.items():
            torch.manual_seed(seed + (spec.head == "value"))
            kind = (
                AutoModelForSequenceClassification if spec.head == "value" else AutoModelForCausalLM
            )
            self._models[model] = kind.from_config(config).float().eval()
        self._units: dict[UnitId, Unit] = {}
        self._shards: dict[UnitId, list[tuple[Device, Shard, Arrays]]] = {}
        for stage, placement in plan.items():
            if stage == ACTOR_GENERATE:
                continue
            for serial, devices in enumerate(placement.units):
                unit = Unit(UnitId(stage, serial), placement.layout, devices)
                self._units[unit.id] = unit
                self._shards[unit.id] = self._cut(unit)
        self.steps = dict.fromkeys(job.models, 0)

    def _cut(self, unit: Unit) -> list[tuple[Device, Shard, Arrays]]:
        model = self._job.model(unit.model_stage)
        values = self._values(unit.model_stage.model)
        found = []
        for device, shard in placed(model, unit.layout, unit.devices):
            arrays: Arrays = {}
            for name, box in shard.items():
                part = values[name][_place(box)].copy()
                arrays[f"{Slot.PARAM}/{name}"] = part
                for slot in slots_of(unit.model_stage.stage)[1:]:
                    arrays[f"{slot}/{name}"] = np.zeros_like(part)
            found.append((device, shard, arrays))
        return found

    def _values(self, model: str) -> Arrays:
        named = dict(self._models[model].named_parameters())
        return {
            rule.name: named[rule.name].detach().numpy()
            for rule in tensor_rules(self._job.models[model])
        }

    # --- Trainer ----------------------------------------------------------------------------------

    @property
    def units(self) -> UnitMap:
        """Units on healthy devices."""
        return UnitMap(self._units.values()).intact(self._failed)

    @property
    def failed(self) -> frozenset[Device]:
        """Devices that were said to be gone."""
        return frozenset(self._failed)

    def publish(self, store: Store) -> None:
        """Put the actor's weights into the store: each training device writes its share."""
        shards = {
            device: (shard, arrays)
            for unit in self.units.of(ACTOR_TRAIN)
            for device, shard, arrays in self._shards[unit.id]
        }

        def read(device: Device, tensor: str, box: Box) -> NDArray[np.generic]:
            shard, arrays = shards[device]
            return arrays[f"{Slot.PARAM}/{tensor}"][box.within(shard[tensor])]

        store.add(
            publish_here(
                self._job.models["actor"],
                [(device, shard) for device, (shard, _) in sorted(shards.items())],
                read,
                version=self.version,
                dtype="float32",
                max_devices=self._max_devices,
            )
        )

    def fail(self, device: Device) -> None:
        """Forget what lay on a device."""
        self._failed.add(device)

    def take_peaks(self) -> dict[Device, int]:
        """Return state bytes per device: they are the same all the time."""
        return {d: n for d in self._job.cluster.devices if (n := self.held_bytes(d))}

    # --- For a harness ----------------------------------------------------------------------------

    def held_bytes(self, device: Device) -> int:
        """State bytes on a device."""
        return sum(
            array.nbytes
            for unit in self.units
            for where, _, arrays in self._shards[unit]
            if where == device
            for array in arrays.values()
        )

    def disturb(self, unit: UnitId, tensor: str) -> None:
        """Add one to ``slot/tensor`` on every rank of a unit."""
        for _, _, arrays in self._shards[unit]:
            if tensor in arrays:
                arrays[tensor] += 1

    def whole(self, unit: UnitId) -> Arrays:
        """Return a unit's state, put together."""
        return assembled(
            self._job.model(unit.model_stage),
            unit.model_stage.stage,
            [
                {key: (shard[key.partition("/")[2]].offset, array) for key, array in arrays.items()}
                for _, shard, arrays in self._shards[unit]
            ],
        )

    # --- Stages -----------------------------------------------------------------------------------

    def reference(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return log-probabilities of responses under the reference."""
        self._put("ref", self._first(REF_INFER))
        with torch.no_grad():
            return [self._logprobs("ref", sample) for sample in samples]

    def values(self, samples: Sequence[Sample]) -> list[float]:
        """Return the critic's value of each response, under ``critic/infer``."""
        stage = ModelStage("critic", Stage.INFER)
        self._put("critic", self._first(stage))
        with torch.no_grad():
            return [float(self._value(sample)) for sample in samples]

    def train_actor(
        self, samples: Sequence[Sample], reference: Sequence[torch.Tensor]
    ) -> tuple[float, float]:
        """Take one step of REINFORCE with a baseline; return loss and gradient norm."""
        rewards = torch.tensor([s.reward for s in samples])
        advantages = rewards - rewards.mean()

        def loss() -> torch.Tensor:
            terms = []
            for sample, advantage, old in zip(samples, advantages, reference, strict=True):
                new = self._logprobs("actor", sample)
                terms.append((-advantage * new + _KL * (new - old).square()).mean())
            return torch.stack(terms).mean()

        found = self._update(ACTOR_TRAIN, loss)
        self.version += 1
        return found

    def train_critic(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Take one step towards the rewards; units of ``critic/infer`` follow."""

        def loss() -> torch.Tensor:
            errors = [self._value(sample) - sample.reward for sample in samples]
            return torch.stack(errors).square().mean()

        found = self._update(ModelStage("critic", Stage.TRAIN), loss)
        for unit in self.units.of(ModelStage("critic", Stage.INFER)):
            self._write(unit.id, {Slot.PARAM: self._values("critic")})
        return found

    def _logprobs(self, model: str, sample: Sample) -> torch.Tensor:
        tokens = torch.tensor([[*sample.prompt, *sample.response]])
        logits = self._models[model](tokens).logits[0, len(sample.prompt) - 1 : -1]
        chosen = torch.tensor(sample.response)[:, None]
        return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]

    def _value(self, sample: Sample) -> torch.Tensor:
        tokens = torch.tensor([[*sample.prompt, *sample.response]])
        hidden = self._models["critic"].model(tokens).last_hidden_state[0, -1]
        value: torch.Tensor = self._models["critic"].score(hidden)[0]
        return value

    def _update(self, stage: ModelStage, loss: Any) -> tuple[float, float]:
        """Take one step of Adam from the first unit's state, into all units."""
        state = self._put(stage.model, self._first(stage))
        model = self._models[stage.model]
        model.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        self.steps[stage.model] += 1
        step = self.steps[stage.model]
        named = dict(model.named_parameters())
        total = 0.0
        new: dict[Slot, Arrays] = {Slot.PARAM: {}, Slot.EXP_AVG: {}, Slot.EXP_AVG_SQ: {}}
        for rule in tensor_rules(self._job.models[stage.model]):
            grad = named[rule.name].grad.numpy()
            total += float(np.square(grad, dtype=np.float64).sum())
            first = _BETAS[0] * state[f"exp_avg/{rule.name}"] + (1 - _BETAS[0]) * grad
            second = _BETAS[1] * state[f"exp_avg_sq/{rule.name}"] + (1 - _BETAS[1]) * grad**2
            size = _LEARNING_RATE / (1 - _BETAS[0] ** step)
            scale = np.sqrt(second / (1 - _BETAS[1] ** step)) + _EPSILON
            new[Slot.PARAM][rule.name] = state[f"param/{rule.name}"] - size * first / scale
            new[Slot.EXP_AVG][rule.name] = first
            new[Slot.EXP_AVG_SQ][rule.name] = second
        for unit in self.units.of(stage):
            self._write(unit.id, new)
        self._put(stage.model, self._first(stage))
        return float(value.detach()), total**0.5

    def _write(self, unit: UnitId, new: Mapping[Slot, Arrays]) -> None:
        for _, shard, arrays in self._shards[unit]:
            for slot, values in new.items():
                for name, box in shard.items():
                    arrays[f"{slot}/{name}"][...] = values[name][_place(box)]

    def _first(self, stage: ModelStage) -> UnitId:
        return self.units.of(stage)[0].id

    def _put(self, model: str, unit: UnitId) -> Arrays:
        """Load a unit's parameters into the model that computes; return its whole state."""
        state = self.whole(unit)
        named = dict(self._models[model].named_parameters())
        with torch.no_grad():
            for rule in tensor_rules(self._job.models[model]):
                named[rule.name].copy_(torch.from_numpy(state[f"param/{rule.name}"]))
        return state


def _place(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
