"""UnitShard: a rank's state, and what the unit's ranks compute together."""

from __future__ import annotations

from functools import cached_property

import torch

from nereus_adapters.torch.engine.generation import Sampling, generate
from nereus_adapters.torch.engine.gradients import GradientPlan
from nereus_adapters.torch.engine.groups import UnitGroups
from nereus_adapters.torch.engine.losses import METRICS, token_scores
from nereus_adapters.torch.engine.optimizer import adamw_step, clip_factor, learning_rate
from nereus_adapters.torch.engine.pipeline import sweep, train_1f1b
from nereus_adapters.torch.engine.types import Batch, Generated, LossSpec, TrainMetrics
from nereus_adapters.torch.engine.unit_state import UnitState
from nereus_core.errors import NereusError
from nereus_core.state import Slot
from nereus_core.workload import Stage


class UnitShard(UnitState):
    """One rank of a unit: its tensors under logical names, and its part in every computation.

    Methods that compute are collective: all ranks of the unit call them with the same arguments,
    for `train` all ranks of all units of the model-stage. Replicas keep the *whole* optimizer
    state, nothing is sharded over data parallelism: a unit is sealed and complete, so any intact
    unit can rebuild a lost one.
    """

    @cached_property
    def _gradients(self) -> GradientPlan:
        return GradientPlan(self.model, self.layout, self.local_rank)

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
