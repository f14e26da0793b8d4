"""UnitShard: what one seat holds of one unit, and what the unit's ranks compute together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nereus_adapters.torch.engine.checkpoint import DEFAULT_STD, Folder
from nereus_adapters.torch.engine.digest import digest_box
from nereus_adapters.torch.engine.families import norm_start
from nereus_adapters.torch.engine.generation import Sampling, generate
from nereus_adapters.torch.engine.gradients import GradientPlan, owners
from nereus_adapters.torch.engine.groups import UnitGroups
from nereus_adapters.torch.engine.initial import cut, initial_tensor
from nereus_adapters.torch.engine.losses import METRICS, token_scores
from nereus_adapters.torch.engine.optimizer import adamw_step, clip_factor, learning_rate
from nereus_adapters.torch.engine.pipeline import sweep, train_1f1b
from nereus_adapters.torch.engine.stage_model import StageModel
from nereus_adapters.torch.engine.types import (
    Batch,
    Generated,
    LossSpec,
    OptimizerSpec,
    Storage,
    TrainMetrics,
    plain_storage,
)
from nereus_core.errors import NereusError
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import Box, Slot, slots_of, tensor_rules, unit_shards
from nereus_core.workload import Stage


class UnitShard:
    """One rank of a unit: its tensors under logical names, and its part in every computation.

    Methods that compute are collective: all ranks of the unit call them with the same arguments,
    for `train` all ranks of all units of the model-stage. Replicas keep the *whole* optimizer
    state, nothing is sharded over data parallelism: a unit is sealed and complete, so any intact
    unit can rebuild a lost one.

    A new shard has no storage. `init`, `load` or `replace` give it one.
    """

    def __init__(
        self,
        model: ModelSpec,
        hf_config: Mapping[str, Any],
        layout: Layout,
        local_rank: int,
        stage: Stage,
        dtype: torch.dtype,
        device: torch.device,
        optimizer: OptimizerSpec | None = None,
        storage: Storage = plain_storage,
    ) -> None:
        """Build the modules on the meta device.

        Args:
            model: shapes; with ``head="value"`` a critic.
            hf_config: values of the model's config.json.
            layout: of the unit.
            local_rank: pp_rank * tp + tp_rank.
            stage: decides which slots are kept.
            dtype: of parameters and activations; moments are at least float32.
            device: where storage is.
            optimizer: needed by `train` only.
            storage: makes what `init`, `load` and `allocate` fill.

        Raises:
            LayoutError: the model's shapes do not allow the layout.
            ModelConfigError: a family or a variant that the engine does not run.
        """
        self.model, self.layout, self.local_rank = model, layout, local_rank
        self.stage, self.device, self.optimizer = stage, device, optimizer
        self.slots = slots_of(stage)
        self.counters: dict[str, int | float] = {"step": 0, "weight_version": 0}
        """State too; it moves with the unit. The learning rate is a function of ``step``."""
        self._dtype, self._storage = dtype, storage
        self._std = float(hf_config.get("initializer_range", DEFAULT_STD))
        self._boxes = unit_shards(model, layout)[local_rank]
        self._module = StageModel(model, hf_config, layout, local_rank, dtype, device)
        self._moments: dict[tuple[Slot, str], torch.Tensor] = {}
        self._gradients = GradientPlan(model, layout, local_rank)
        self._linked = layout.num_devices == 1

    # --- State ------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Logical tensors of this rank, in the state map's order."""
        return tuple(self._boxes)

    def box(self, name: str) -> Box:
        """Return which part of a logical tensor this rank holds."""
        return self._boxes[name]

    def dtype(self, slot: Slot) -> torch.dtype:
        """Return the dtype of a slot's tensors."""
        if slot is Slot.PARAM:
            return self._dtype
        return torch.promote_types(self._dtype, torch.float32)

    def tensor(self, slot: Slot, name: str) -> torch.Tensor:
        """Return the local storage of a logical tensor's box; nothing is copied or gathered."""
        is_param = slot is Slot.PARAM
        return self._module.get_parameter(name).detach() if is_param else self._moments[slot, name]

    def allocate(self) -> dict[tuple[Slot, str], torch.Tensor]:
        """Return uninitialized tensors for every slot and name, to be filled and adopted."""
        return {
            (slot, name): self._storage(box.shape, self.dtype(slot), self.device)
            for slot in self.slots
            for name, box in self._boxes.items()
        }

    def replace(self, tensors: Mapping[tuple[Slot, str], torch.Tensor]) -> None:
        """Adopt tensors as this rank's storage; nothing is copied.

        Raises:
            NereusError: a tensor is not this rank's, or has another shape or dtype; nothing was
                adopted then.
        """
        for (slot, name), tensor in tensors.items():
            if slot not in self.slots or name not in self._boxes:
                raise NereusError(f"{slot}/{name} is not held by rank {self.local_rank} here.")
            expected = (self._boxes[name].shape, self.dtype(slot))
            if (tuple(tensor.shape), tensor.dtype) != expected:
                got = (tuple(tensor.shape), tensor.dtype)
                raise NereusError(f"{slot}/{name}: got {got}, expected {expected}.")
        for (slot, name), tensor in tensors.items():
            if slot is Slot.PARAM:
                self._module.adopt(name, tensor, trains=self.stage is Stage.TRAIN)
            else:
                self._moments[slot, name] = tensor

    def blank(self, slot: Slot, name: str) -> None:
        """Let go of a tensor's storage: a tensor without any takes its place."""
        shape, dtype = self._boxes[name].shape, self.dtype(slot)
        self.replace({(slot, name): torch.empty(shape, dtype=dtype, device="meta")})

    def clear(self) -> None:
        """Let go of all storage at once; modules refer to themselves, and are collected later."""
        for slot in self.slots:
            for name in self._boxes:
                self.blank(slot, name)

    def init(self, seed: int) -> None:
        """Fill with random weights and zero moments; the same model in every layout."""
        norm = norm_start(self.model.family)
        shapes = {rule.name: rule.shape for rule in tensor_rules(self.model)}
        self._start(
            {
                name: cut(initial_tensor(name, shapes[name], seed, self._std, norm), box)
                for name, box in self._boxes.items()
            }
        )

    def load(self, folder: Path | str) -> None:
        """Read this rank's boxes, and no more, from a safetensors folder; moments are zero."""
        self._start(Folder(Path(folder)).read(self._boxes, self._dtype))

    def _start(self, weights: Mapping[str, torch.Tensor]) -> None:
        tensors = self.allocate()
        for (slot, name), tensor in tensors.items():
            if slot is Slot.PARAM:
                tensor.copy_(weights[name])
            else:
                tensor.zero_()
        self.replace(tensors)
        self.counters.update(step=0, weight_version=0)

    def resident_bytes(self) -> int:
        """Bytes of parameters and moments held now; gradients exist inside `train` only."""
        params = sum(p.nbytes for p in self._module.parameters() if not p.is_meta)
        return params + sum(m.nbytes for m in self._moments.values())

    def digests(self) -> dict[str, str]:
        """Return partial digests; `digest.combine` adds up those of all ranks."""
        owner = owners(self.model, self.layout, self.local_rank)
        return {
            f"{slot.value}/{name}"
            + ("" if owner[name] == self.local_rank else f"@{owner[name]}"): digest_box(
                self.tensor(slot, name), box
            )
            for slot in self.slots
            for name, box in self._boxes.items()
        }

    # --- Computation ------------------------------------------------------------------------

    def link(self, groups: UnitGroups) -> None:
        """Use these groups from now on; closes none."""
        sizes = (groups.tp.size, groups.pp.size)
        if sizes != (self.layout.tp, self.layout.pp):
            raise NereusError(f"groups are of tp, pp {sizes}, the unit is {self.layout}.")
        self._module.groups = groups
        self._linked = True

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        eos_id: int | None = None,
        seeds: list[int],
        greedy: bool = False,
    ) -> Generated:
        """Generate one response per prompt; the result is on every rank of the unit.

        What is sampled depends on a sequence's seed and prompt, not on layout or batch.
        """
        self._ready()
        if self.model.head != "lm":
            raise NereusError(f"{self.model.name} has a value head; it generates nothing.")
        if len(seeds) != len(prompts):
            raise NereusError(f"{len(prompts)} prompts and {len(seeds)} seeds; one each is needed.")
        if not greedy and temperature <= 0:
            raise NereusError(f"temperature {temperature:g} is not positive; use greedy=True.")
        if not prompts:
            return Generated([], [])
        sampling = Sampling(max_new_tokens, temperature, eos_id, greedy)
        return generate(self._module, prompts, seeds, sampling)

    def logprobs(self, batch: Batch, micro_batch: int | None = None) -> torch.Tensor | None:
        """Return [B, T], zero outside responses; None where the last stage is not held."""
        return self._infer(batch, micro_batch, value=False)

    def values(self, batch: Batch, micro_batch: int | None = None) -> torch.Tensor | None:
        """Return [B, T]: at a response token the value of the state before it; else as above."""
        return self._infer(batch, micro_batch, value=True)

    def _infer(self, batch: Batch, micro_batch: int | None, *, value: bool) -> torch.Tensor | None:
        self._ready()
        if (self.model.head == "value") is not value:
            raise NereusError(f"{self.model.name} has no {'value' if value else 'LM'} head.")
        batch = batch.to(self.device)
        wide = torch.promote_types(self._dtype, torch.float32)
        found = torch.zeros(batch.tokens.shape, dtype=wide, device=self.device)
        start = 0
        for rows, hidden in sweep(
            self._module, batch.micro_batches(micro_batch or max(1, len(batch)))
        ):
            mask = rows.response_mask
            part = found[start : start + len(rows), : mask.shape[1]]
            part[mask] = token_scores(self._module, hidden, rows)
            start += len(rows)
        return found if self._module.is_last else None

    def train(self, batch: Batch, loss: LossSpec, micro_batch: int) -> TrainMetrics:
        """Do one optimizer step over the batches of all units.

        Args:
            batch: this unit's share.
            loss: its normalizer counts the tokens of all shares.
            micro_batch: sequences per forward and backward.

        Returns:
            Metrics, identical everywhere.

        Raises:
            WaitTimeout, PeerLost: nothing was changed on this rank; close its groups, so that those
                who wait for it fail too. Ranks of an intact unit agree on whether the step was
                done; units may not, ``counters["step"]`` tells.
        """
        self._ready()
        if self.stage is not Stage.TRAIN or self.optimizer is None:
            raise NereusError(f"a {self.stage} shard without optimizer cannot train.")
        groups, plan = self._module.groups, self._gradients
        params = dict(self._module.named_parameters())
        step = int(self.counters["step"])
        try:
            micro = batch.to(self.device).micro_batches(micro_batch)
            sums = groups.dp.all_reduce(groups.pp.all_reduce(train_1f1b(self._module, micro, loss)))
            grads = {
                name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in params.items()
            }
            plan.sum_copies(grads, groups)
            plan.sum_units(grads, groups.dp)
            # The last exchange, inside the unit: past it every rank of the unit takes the step.
            norm = plan.norm(grads, groups.unit)
            factor = clip_factor(norm, self.optimizer.max_grad_norm)
            for name, grad in grads.items():
                if factor < 1.0:
                    grad.mul_(factor)
                adamw_step(
                    self.optimizer,
                    step,
                    params[name],
                    grad,
                    self._moments[Slot.EXP_AVG, name],
                    self._moments[Slot.EXP_AVG_SQ, name],
                )
        finally:
            for param in params.values():
                param.grad = None
        self.counters["step"] = step + 1
        self.counters["weight_version"] = int(self.counters["weight_version"]) + 1
        measured = dict(zip(METRICS, sums.tolist(), strict=True))
        return TrainMetrics(grad_norm=norm, lr=learning_rate(self.optimizer, step), **measured)

    def _ready(self) -> None:
        if not self._linked:
            raise NereusError(f"rank {self.local_rank} of {self.layout} has no groups; link first.")
        missing = [n for n, p in self._module.named_parameters() if p.is_meta]
        missing += [n for n in self._boxes for s in self.slots[1:] if (s, n) not in self._moments]
        if missing:
            raise NereusError(f"{len(missing)} tensors have no storage, first {missing[0]}.")
