"""UnitState: what one seat holds of one unit, under logical names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nereus_adapters.torch.engine.checkpoint import DEFAULT_STD, Folder
from nereus_adapters.torch.engine.digest import digest_box
from nereus_adapters.torch.engine.families import norm_start
from nereus_adapters.torch.engine.gradients import owners
from nereus_adapters.torch.engine.groups import UnitGroups
from nereus_adapters.torch.engine.initial import cut, initial_tensor
from nereus_adapters.torch.engine.stage_model import StageModel
from nereus_adapters.torch.engine.types import OptimizerSpec, Storage, plain_storage
from nereus_core.errors import NereusError
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import Box, Slot, slots_of, tensor_rules, unit_shards
from nereus_core.workload import Stage


class UnitState:
    """One rank's tensors, and the modules that they are the parameters of.

    Built without storage: `init`, `load` or `replace` give it one, `clear` takes it away again.
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
        self._linked = layout.num_devices == 1

    @property
    def names(self) -> tuple[str, ...]:
        """Logical tensors of this rank, in the state map's order."""
        return tuple(self._boxes)

    def holds(self, name: str) -> bool:
        """Whether this rank has a part of a logical tensor."""
        return name in self._boxes

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
        """Be as one that was just built: no storage, no groups, no steps."""
        for name in self._boxes:
            self.blank(Slot.PARAM, name)
        self._moments.clear()
        self._module.groups = UnitGroups.single()
        self._linked = self.layout.num_devices == 1
        self.counters = {"step": 0, "weight_version": 0}

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
