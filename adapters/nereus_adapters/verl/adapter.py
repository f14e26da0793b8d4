"""VerlAdapter: a verl trainer behind the core's Adapter protocol.

Primitives make and check state; what the trainer steps on changes in `relink` alone, at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl import capabilities_with, shards
from nereus_adapters.verl.fitting import Fitting, serves
from nereus_adapters.verl.fleet import Fleet
from nereus_adapters.verl.moving import Move
from nereus_adapters.verl.peaks import device_peaks
from nereus_adapters.verl.reading import job_of, require_engine, require_stages
from nereus_adapters.verl.recorder import Recorder
from nereus_adapters.verl.refusals import refusals
from nereus_adapters.verl.rollouts import Rollouts
from nereus_adapters.verl.settings import VerlSettings
from nereus_adapters.verl.standalone import Standalone
from nereus_adapters.verl.standing import (
    ROLES,
    Ranks,
    bundles,
    devices_of,
    free_devices,
    is_hybrid,
    rank_order,
    replicas_of,
    rollout_units,
    train_units,
)
from nereus_adapters.verl.switching import Switch, serving
from nereus_adapters.verl.ulysses import Ulysses
from nereus_core.adapter import Boundary, Fingerprint, Receipt
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.errors import (
    Infeasible,
    PlanError,
    SeatDead,
    StateDiffers,
    TransitionFailed,
    Unsupported,
)
from nereus_core.gate import Gate
from nereus_core.ledger import Done, Ledger, Standing, require_identical
from nereus_core.ledger_adapter import LedgerAdapter, alive, require_plan
from nereus_core.observation import Observation, TokenStats
from nereus_core.phases import Enter, Phase
from nereus_core.plan import Plan
from nereus_core.primitives import (
    Destroy,
    Merge,
    Primitive,
    created,
    ended,
    model_stage_of,
    sources,
)
from nereus_core.state import Box
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Job, ModelStage, Stage

_ROLE_OF = {stage: role for role, stage in ROLES.items()}


class VerlAdapter(LedgerAdapter):
    """Implements `nereus_core.adapter.Adapter`.

    Args:
        trainer: verl's PPOTrainer, after its ``init()``.
        config: ``backend`` holds `VerlSettings`.
    """

    name = "verl"

    def __init__(self, trainer: Any, config: NereusConfig) -> None:
        settings = VerlSettings.of(config.backend)
        self.capabilities = capabilities_with(settings.engine)
        super().__init__(Ledger(self.capabilities))
        self._trainer, self._timeouts = trainer, config.timeouts
        self._refused = "; ".join(refusals(trainer))
        if self._refused and config.mode == "adapt":
            raise Unsupported("mode adapt", f"{self._refused}. Modes observe and advise work.")
        ranks = Ranks.of(trainer.actor_rollout_wg.workers, self._timeouts.primitive_s)
        require_engine(ranks.facts[0], settings)
        require_stages(ranks.facts[0], settings)
        replicas = replicas_of(trainer)
        of_worker = devices_of(ranks, replicas, self._timeouts.primitive_s)
        own = tuple(dict.fromkeys(of_worker.values()))
        spare = free_devices(own, (settings.max_devices or len(own)) - len(own))
        self._changes, self._hybrid = not self._refused, is_hybrid(trainer)
        rollout = trainer.config.actor_rollout_ref.rollout
        # Otherwise a replica frees its weights before the trainer computes.
        self._resident = not rollout.free_cache_engine
        sleepers = 0
        if config.mode == "adapt" and self._hybrid and not self._resident:
            sleepers = settings.sleeping_replicas
        ulysses = Ulysses.of(ranks.facts[0], settings)
        self._job = job_of(
            trainer, ranks.facts[0], (*own, *spare), settings, ulysses,
            hybrid=self._hybrid, sleepers=sleepers,
        )  # fmt: skip
        share = None if self._hybrid else float(rollout.gpu_memory_utilization)
        self._fitting = Fitting.of(self._job, ranks.facts[0], share)
        self._order = rank_order(own, spare)
        self._units = UnitMap([*train_units(ranks), *rollout_units(replicas, of_worker)])
        self.linked = self._units
        self._parked = UnitMap()
        """Units that have ended in this transition and from which others are still to be made."""
        if self._changes:
            limit_s, served = self._timeouts.primitive_s, serving(self._units)
            held = bundles(trainer, ranks, of_worker)
            self.fleet = Fleet(trainer, ranks.devices, held, limit_s)
            self.rollouts: Rollouts
            if self._hybrid:
                self.rollouts = Rollouts(trainer, served, self.fleet, limit_s, sleepers)
            else:
                self.rollouts = Standalone(
                    trainer, served, self.fleet, limit_s, lambda: self._recorder.amid_step
                )
            self._switch = Switch(trainer, self.fleet, self.rollouts, self._order, ulysses, limit_s)
        self._observed = -1
        self._recorder = Recorder(trainer, self._job.max_response_tokens)
        asynchronous = trainer.trainer_mode != "sync"
        self.gate = Gate(self._timeouts.boundary_s, asynchronous=asynchronous)
        self._lock = threading.RLock()

    # --- Reading ------------------------------------------------------------------------------

    def job(self) -> Job:
        """Static facts; devices whose process or node is gone are marked."""
        nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        dead = self.fleet.dead if self._changes else frozenset()
        lost = [d for d in self._job.cluster.devices if d.node not in nodes or d in dead]
        return self._job.on(self._job.cluster.without(lost)) if lost else self._job

    def units(self) -> UnitMap:
        """Shard groups of the trainer's engines and the rollout's replicas, those staged too."""
        return self._units.intact(self.fleet.dead) if self._changes else self._units

    def observe(self) -> Observation:
        """Drain the step that verl has just completed."""
        job = self.job()
        seen, healthy = self._recorder.drained(), frozenset(job.cluster.healthy)
        if seen is None:
            nothing = TokenStats.of([])
            return Observation(self._observed, 0.0, {}, nothing, nothing, {}, healthy)
        self._observed = seen.step
        return Observation(
            step=seen.step,
            step_s=seen.step_s,
            stage_s={s: t for s, t in seen.stage_s.items() if s in job.workload.stages},
            prompt_tokens=seen.prompt_tokens,
            response_tokens=seen.response_tokens,
            peak_bytes=device_peaks(seen.peak_bytes, self._units, self._job, self._resident),
            healthy=healthy,
            metrics=seen.metrics,
            clip_ratio=seen.clip_ratio,
        )

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        """Digest logical state where it lies; digests of the ranks' shards add up.

        A rollout replica has no state of its own: verl gives it the trainer's weights before it
        serves.
        """
        found = alive(unit, self.units())
        if serves(found):
            return Fingerprint(unit, {}, {})
        answers = call_all(
            self.fleet.workers(found.devices), shards.digests, _ROLE_OF[unit.model_stage],
            str(unit), awaited=f"digests of {unit}", timeout_s=self._timeouts.transfer_s,
        )  # fmt: skip
        sums: dict[str, int] = {}
        counters: dict[str, int] = {}
        seen: dict[tuple[str, Box], int] = {}
        for parts, counted in answers.values():
            for tensor, (box, part) in parts.items():
                # Tensor-parallel ranks hold some tensors whole; empty boxes digest to 0.
                if (first := seen.setdefault((tensor, box), part)) != part:
                    raise StateDiffers(unit, f"{tensor} of one rank", f"{part:x}", f"{first:x}")
            counters |= counted
        for (tensor, _), part in seen.items():
            sums[tensor] = (sums.get(tensor, 0) + part) % 2**64
        return Fingerprint(unit, {t: f"{n:016x}" for t, n in sums.items()}, counters)

    # --- Boundary -----------------------------------------------------------------------------

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        """Hold stages; entered by the trainer's own thread at its boundary, where all are idle."""
        held, begin_s = self.gate.close_on(stages, timeout_s), time.perf_counter()
        try:
            yield Boundary(held, int(self._trainer.global_steps))
        finally:
            self._recorder.leave_out(time.perf_counter() - begin_s)
            self.gate.open()

    def relink(self, plan: Plan) -> None:
        """Switch the trainer over to the units alive.

        Raises:
            PlanError: the units alive are not the plan's, or replicas lie on trainers' devices.
            TransitionFailed: the ranks could not meet; says whether the old plan goes on.
        """
        before, after = self.linked, self.units()
        require_plan(plan, self.job(), after)
        self._forget_parked()
        if not self._hybrid and plan.sharing(ACTOR_GENERATE, ACTOR_TRAIN):
            raise PlanError(["separate_async: trainers and rollout replicas share a device"])
        if before == after:
            return
        try:
            self._switch.run(before, after)
        except TransitionFailed:
            self._units = before
            raise
        self._units = self.linked = after

    def close(self) -> None:
        """Give the trainer its method back and end what sleeps; the job goes on."""
        self._recorder.stop()
        if self._changes:
            self.rollouts.leave()

    # --- Primitives ---------------------------------------------------------------------------

    def perform(self, op: Primitive) -> Receipt:
        """Perform a primitive; a rank that died of it is known from then on."""
        try:
            return super().perform(op)
        except SeatDead as error:
            self._missed(error)
            raise

    def _missed(self, error: SeatDead) -> None:
        if isinstance(error.device, Device):
            self.fleet.dead.add(error.device)

    def _standing(self) -> Standing:
        units = self.units()
        lost = [unit for unit in self._units if unit not in units]
        parked = self._parked.intact(self.fleet.dead) if self._changes else self._parked
        return Standing(self.job(), units, self.gate.held, self.gate.inside, parked, lost)

    def _do(self, op: Primitive, readable: UnitMap, enter: Enter) -> Done:
        if not self._changes:
            raise Unsupported(str(op), self._refused)
        stage = model_stage_of(op)
        apart = not self._hybrid and stage.stage is Stage.GENERATE
        if not apart:
            self._require_runs(op)
        self._fitting.require(op, self.units(), self.linked, self._parked)
        made, gone = created(op), ended(op)
        enter(Phase.PREPARE)
        if not apart:
            self.fleet.start([d for unit in made for d in unit.devices])
        if stage.stage is Stage.GENERATE:
            done = self._serve(made, enter)
        elif made:
            done = self._stage(op, made, tuple(readable[u] for u in sources(op)), enter)
        else:
            done = Done()
            for phase in (Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT):
                enter(phase)
        resting = [readable[op.unit]] if isinstance(op, Destroy) and op.park else []
        with self._lock:
            self._units = self._units.replace(gone, made)
            self._parked = self._parked.replace([], resting)
        for unit in gone:
            if unit not in self._parked or serves(readable[unit]):
                self._end(readable[unit])
        enter(Phase.RELEASE)
        return done

    def _stage(
        self, op: Primitive, made: tuple[Unit, ...], origin: tuple[Unit, ...], enter: Enter
    ) -> Done:
        """Make the state of new shard groups from that of others."""
        if isinstance(op, Merge) and len(origin) > 1:
            require_identical(op, self.fingerprint)
        limit_s = self._timeouts.transfer_s
        role = _ROLE_OF[model_stage_of(op)]
        move = Move.plan(role, origin, made, self.fleet, limit_s)
        move.run(self.fleet, limit_s, enter)
        return Done(move.moved_bytes, move.kept_bytes)

    def _serve(self, made: tuple[Unit, ...], enter: Enter) -> Done:
        """Start rollout replicas, at once: each takes a minute and little of any machine."""
        started: list[Unit] = []
        try:
            with ThreadPoolExecutor(max(1, len(made)), "nereus-replica") as pool:
                starts = {unit: pool.submit(self.rollouts.start, unit) for unit in made}
            started += [unit for unit, start in starts.items() if start.exception() is None]
            for start in starts.values():
                start.result()
            for phase in (Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT):
                enter(phase)
        except BaseException:
            for unit in started:
                self.rollouts.end(unit.id)
            raise
        return Done()

    def _end(self, unit: Unit) -> None:
        """End a unit of this transition at once; one that the job steps on, with the switch."""
        if serves(unit):
            self.rollouts.end(unit.id)
        elif unit.id not in self.linked:
            call_all(
                self.fleet.workers(unit.devices), shards.drop, [str(unit.id)],
                awaited=f"the end of {unit.id}", timeout_s=self._timeouts.transfer_s,
            )  # fmt: skip

    def _forget_parked(self) -> None:
        """End what was kept to be read; engines hold what they step on until the switch."""
        parked, self._parked = self._parked, UnitMap()
        for unit in parked.values():
            if not serves(unit):
                self._end(unit)

    def _require_runs(self, op: Primitive) -> None:
        """Raise Infeasible unless new units are runs of devices in the order of ranks."""
        for unit in created(op):
            places = [self._order.index(d) for d in unit.devices]
            run = list(range(places[0], places[0] + len(places)))
            # Between ranks of separate_async lie replicas' devices; the switch knows who they are.
            if places != run and (self._hybrid or places != sorted(places)):
                raise Infeasible(f"{op}: {unit} is no run of verl's ranks.", op)
