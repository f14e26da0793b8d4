"""VerlAdapter: a verl trainer behind the core's Adapter protocol."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from nereus_adapters.verl import CAPABILITIES
from nereus_adapters.verl.reading import job_of
from nereus_adapters.verl.recorder import Recorder, SeenStep
from nereus_adapters.verl.settings import VerlSettings
from nereus_adapters.verl.standing import Ranks, free_devices, rollout_units, train_units
from nereus_core.adapter import Boundary, Fingerprint, Receipt
from nereus_core.config import NereusConfig
from nereus_core.errors import Unsupported
from nereus_core.gate import Gate
from nereus_core.ledger import Done, Ledger, Standing
from nereus_core.observation import Observation, TokenStats
from nereus_core.phases import Enter, PhaseHook
from nereus_core.plan import Plan, check_plan
from nereus_core.primitives import Destroy, Extend, Merge, Primitive, Split
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import ACTOR_TRAIN, CRITIC_TRAIN, Job, ModelStage


class VerlAdapter:
    """Implements `nereus_core.adapter.Adapter`.

    Args:
        trainer: verl's PPOTrainer, after its ``init()``.
        config: ``backend`` holds `VerlSettings`.
    """

    name = "verl"

    def __init__(self, trainer: Any, config: NereusConfig) -> None:
        self._trainer, self._config = trainer, config
        settings = VerlSettings.of(config.backend)
        self._ranks = Ranks.of(trainer.actor_rollout_wg.workers, config.timeouts.primitive_s)
        self._of_worker = self._devices_of_workers()
        own = tuple(dict.fromkeys(self._of_worker.values()))
        spare = free_devices(own, (settings.max_devices or len(own)) - len(own))
        self._job = job_of(trainer, self._ranks.facts[0], (*own, *spare), settings)
        self._recorder = Recorder(trainer, self._job.max_response_tokens)
        self._ledger = Ledger(CAPABILITIES)
        self._gate = Gate(config.timeouts.boundary_s)

    # --- Reading ------------------------------------------------------------------------------

    def job(self) -> Job:
        """Static facts; devices of nodes that Ray has lost are marked."""
        alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        lost = [d for d in self._job.cluster.devices if d.node not in alive]
        return self._job.on(self._job.cluster.without(lost)) if lost else self._job

    def units(self) -> UnitMap:
        """Shard groups of the trainer's engines, and the rollout's replicas."""
        replicas = rollout_units(self._replicas(), self._of_worker, ())
        return UnitMap([*train_units(self._ranks, {}), *replicas])

    def observe(self) -> Observation:
        """Drain the step that verl has just completed."""
        job = self.job()
        seen, healthy = self._recorder.drained(), frozenset(job.cluster.healthy)
        if seen is None:
            nothing = TokenStats.of([])
            return Observation(-1, 0.0, {}, nothing, nothing, {}, healthy)
        return Observation(
            step=seen.step,
            step_s=seen.step_s,
            stage_s={s: t for s, t in seen.stage_s.items() if s in job.workload.stages},
            prompt_tokens=seen.prompt_tokens,
            response_tokens=seen.response_tokens,
            peak_bytes=self._peaks(seen),
            healthy=healthy,
            metrics=seen.metrics,
            clip_ratio=seen.clip_ratio,
        )

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        """Digest logical state; not before state can be moved."""
        raise Unsupported(f"fingerprint of {unit}", "state of a verl job is not digested yet")

    # --- Boundary and primitives --------------------------------------------------------------

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        """Hold stages; called by the trainer's own thread at its boundary, so that all are idle."""
        held, begin_s = self._gate.close_on(stages, timeout_s), time.perf_counter()
        try:
            yield Boundary(held, int(self._trainer.global_steps))
        finally:
            self._recorder.leave_out(time.perf_counter() - begin_s)
            self._gate.open()

    def split(self, op: Split) -> Receipt:
        """One shard group becomes smaller ones."""
        return self._once(op)

    def merge(self, op: Merge) -> Receipt:
        """Shard groups become one that shards over all their ranks."""
        return self._once(op)

    def extend(self, op: Extend) -> Receipt:
        """A shard group or a replica on new devices."""
        return self._once(op)

    def destroy(self, op: Destroy) -> Receipt:
        """A shard group or a replica ends."""
        return self._once(op)

    def watch(self, on_phase: PhaseHook | None) -> None:
        """Tell of phases."""
        self._ledger.watch(on_phase)

    def relink(self, plan: Plan) -> None:
        """Check that the plan is what runs."""
        check_plan(plan, self.job())

    def close(self) -> None:
        """Give the trainer its method back; the job goes on."""
        self._recorder.stop()

    # --- Inside -------------------------------------------------------------------------------

    def _once(self, op: Primitive) -> Receipt:
        return self._ledger.perform(op, self._standing, self._do)

    def _standing(self) -> Standing:
        return Standing(self.job(), self.units(), self._gate.held, self._gate.inside)

    def _do(self, op: Primitive, readable: UnitMap, enter: Enter) -> Done:
        raise Unsupported(str(op), "live changes of a verl job are not written yet", op)

    def _managers(self) -> tuple[Any, ...]:
        both = ("llm_server_manager", "standalone_server_manager")
        return tuple(m for name in both if (m := getattr(self._trainer, name, None)) is not None)

    def _replicas(self) -> list[Any]:
        return [replica for manager in self._managers() for replica in manager.get_replicas()]

    def _devices_of_workers(self) -> dict[Any, Any]:
        known = {w._actor_id: d for w, d in zip(self._ranks.workers, self._ranks.devices, strict=True)}
        others = [w for r in self._replicas() for w in r.workers if w._actor_id not in known]
        if others:
            ranks = Ranks.of(others, self._config.timeouts.primitive_s)
            known |= {w._actor_id: d for w, d in zip(others, ranks.devices, strict=True)}
        return known

    def _peaks(self, seen: SeenStep) -> dict[Any, int]:
        """Charge every device of a stage with the largest allocation of its ranks."""
        stages = {"actor": ACTOR_TRAIN, "critic": CRITIC_TRAIN}
        peaks: dict[Any, int] = {}
        for unit in self.units().values():
            for role, peak in seen.peak_bytes.items():
                if unit.model_stage == stages[role]:
                    peaks |= {d: max(peak, peaks.get(d, 0)) for d in unit.devices}
        return peaks
