"""One RL step of the simulated job: batch, stages in order, update, weight synchronisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from nereus_core.cluster import Device
from nereus_core.harness import StepResult
from nereus_core.observation import Observation, TokenStats, clip_ratio
from nereus_core.sim import training
from nereus_core.sim.pace import EFFICIENCY, transient_bytes, unit_seconds
from nereus_core.sim.world import Store
from nereus_core.state import Slot
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ModelStage, Node, Stage

if TYPE_CHECKING:
    from nereus_core.sim.job import SimJob

Tokens = tuple[int, int]
"""Of one sample: prompt, response."""


@dataclass(slots=True)
class Live:
    """A unit with its state."""

    unit: Unit
    stores: tuple[Store, ...]
    """In order of local rank."""
    counters: dict[str, int]
    """State too: optimizer step, random draws, weight version."""


class Run:
    """One RL step as it runs."""

    def __init__(self, job: SimJob, step: int) -> None:
        self.job, self.step = job, step
        self.static = job.job
        self.stage_s: dict[ModelStage, float] = {}
        self.transient: dict[Device, int] = {}
        self.losses: dict[str, float] = {}
        self.grad_norms: dict[str, float] = {}
        self.tokens: list[Tokens] = []

    def _lengths(self, samples: Iterable[int]) -> list[Tokens]:
        script, static = self.job.script, self.static
        return [(script.prompt(static, s), script.response(static, self.step, s)) for s in samples]

    def _work(self, node: Node, samples: Sequence[int]) -> dict[UnitId, tuple[int, ...]]:
        """Spend a stage's time; return each unit's slice of the batch."""
        start_s = self.job.world.clock.now_s()
        members = self.job.participants(node.model_stage)
        slices = _partition(samples, len(members))
        seconds = 0.0
        for live, part in zip(members, slices, strict=True):
            tokens = self._lengths(part)
            seconds = max(seconds, unit_seconds(self.static, live.unit, tokens, node.passes))
            for device, need in transient_bytes(self.static, live.unit, tokens).items():
                self.transient[device] = max(self.transient.get(device, 0), need)
        self.job.world.clock.spend(seconds)
        self.stage_s[node.model_stage] = self.job.world.clock.now_s() - start_s
        return {live.unit.id: part for live, part in zip(members, slices, strict=True)}

    def generate(self) -> None:
        """Draw a batch and give it to the generating units."""
        for node in self.static.workload.nodes:
            if node.model_stage.stage is Stage.GENERATE:
                with self.job.gate.stages(node.model_stage):
                    self.job.participants(node.model_stage)  # before a prompt is drawn
                    # A step that was cut short left its prompts: they are generated again.
                    drawn = self.job.pending() or self.job.draw()
                    slices = self._work(node, drawn)
                    self.job.requests = slices
                    self.job.served = {
                        u: self.job.live(u).counters["weight_version"] for u in slices
                    }

    def train(self) -> StepResult:
        """Take what was generated through all other stages, then synchronise weights."""
        for stage in self.static.workload.stages:
            self.job.participants(stage)  # a loss is noticed before anything is trained
        batch, served = self.job.pending(), self.job.served
        self.tokens = self._lengths(batch)
        consumed: tuple[int, ...] = ()
        for node in self.static.workload.nodes:
            stage = node.model_stage
            if stage.stage is Stage.GENERATE:
                continue
            with self.job.gate.stages(stage):
                slices = self._work(node, batch)
                if stage.stage is Stage.TRAIN:
                    self._update(stage, slices)
                    consumed = tuple(s for part in slices.values() for s in part)
        self.job.requests = {}
        for node in self.static.workload.nodes:
            if node.weights_from is not None:
                self._follow(node.model_stage, node.weights_from)
        return StepResult(self.step, self.losses, consumed, served, self.grad_norms)

    def _update(self, stage: ModelStage, slices: Mapping[UnitId, tuple[int, ...]]) -> None:
        model, seed = self.static.model(stage), self.job.script.seed
        members = [self.job.live(u) for u in slices]
        batch = sum(map(len, slices.values()))
        # The all-reduce over data-parallel units: each adds the samples of its slice.
        total = sum(
            training.sample_sum(seed, m.counters["rng"], slices[m.unit.id]) for m in members
        )
        for live in members:
            layout = live.unit.layout
            grads = [training.gradients(s, model, total, batch) for s in live.stores]
            if live is members[0]:
                self.losses[stage.model] = training.loss(live.stores, model, layout, total, batch)
                self.grad_norms[stage.model] = training.grad_norm(grads, model, layout)
            live.counters["step"] += 1
            live.counters["rng"] += 1
            live.counters["weight_version"] += 1
            for store, grad in zip(live.stores, grads, strict=True):
                training.update(store, grad, live.counters["step"])

    def _follow(self, follower: ModelStage, train: ModelStage) -> None:
        sources = self.job.participants(train)
        with self.job.gate.stages(follower, receiving=True):
            for target in self.job.participants(follower):
                self.job.carry(sources, target, (Slot.PARAM,))
                target.counters["weight_version"] = sources[0].counters["weight_version"]

    def observation(self, step_s: float, result: StepResult) -> Observation:
        """Say what was seen in this step."""
        world, lengths = self.job.world, [r for _, r in self.tokens]
        return Observation(
            step=self.step,
            step_s=step_s,
            stage_s=dict(self.stage_s),
            prompt_tokens=TokenStats.of([p for p, _ in self.tokens]),
            response_tokens=TokenStats.of(lengths),
            peak_bytes=world.take_peaks(self.transient),
            healthy=frozenset(world.cluster.healthy),
            draining=world.draining,
            efficiency={"gemm": EFFICIENCY},
            metrics={f"{model}/loss": loss for model, loss in result.losses.items()},
            clip_ratio=clip_ratio(lengths, self.static.max_response_tokens),
        )


def _partition(samples: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Cut a batch into contiguous slices, in order, that differ by at most one."""
    short, longer = divmod(len(samples), parts)
    cuts = [i * short + min(i, longer) for i in range(parts + 1)]
    return [tuple(samples[a:b]) for a, b in pairwise(cuts)]
