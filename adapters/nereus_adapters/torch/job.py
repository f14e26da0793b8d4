"""TorchJob: a running RL job on seats. It knows units, steps and devices, and no primitive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nereus_adapters.rollout.figures import figures_of, with_engines
from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.rollout.ports import EngineFactory
from nereus_adapters.torch.adopting import adopt
from nereus_adapters.torch.engines import SeatTrainer, without_generation
from nereus_adapters.torch.fleet import Fleet, Pool
from nereus_adapters.torch.manifest import Manifest
from nereus_adapters.torch.rl.rollout import Rollout
from nereus_adapters.torch.rl.tasks import Task
from nereus_adapters.torch.saving import facts, frozen, origin, require_origin, restore, save
from nereus_adapters.torch.seen import nothing_seen, seen_in
from nereus_adapters.torch.settings import RlSettings
from nereus_adapters.torch.steps import Steps
from nereus_adapters.torch.supply import Supply
from nereus_adapters.torch.values import Memory, ModelSource
from nereus_adapters.torch.weights import Weights
from nereus_core.cluster import Device
from nereus_core.errors import CheckpointError, UnitLost, Unsupported
from nereus_core.gate import Gate
from nereus_core.observation import Observation
from nereus_core.plan import Plan, check_plan
from nereus_core.state import Slot, slots_of
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Job, ModelStage, Stage


class TorchJob:
    """A running job.

    `step` may be called from one thread while another changes units at a boundary: the gate keeps
    them apart. A step that is cut short leaves its rollout, and the next call goes on from it.

    Args:
        job: what runs; its cluster lists the devices of the pool.
        plan: where it runs at first; None takes over what the pool's seats hold.
        sources: model -> shapes, configuration and start-up weights.
        task: prompts and rewards.
        settings: hyperparameters and limits.
        pool: seats; started where they are not, closed with the job when ``owns_pool``.
        resume: checkpoint folder to start from instead of step 0.
        engines: makes what generates, where the seats do not; closed with the job.

    Raises:
        CheckpointError: the checkpoint is broken, or of another job.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        sources: Mapping[str, ModelSource],
        task: Task,
        settings: RlSettings,
        pool: Pool,
        *,
        owns_pool: bool = True,
        resume: Path | None = None,
        engines: EngineFactory | None = None,
    ) -> None:
        if job.workload.asynchronous:
            raise Unsupported("an asynchronous workload", "generation waits for weights here")
        if plan is not None:
            check_plan(plan, job)
        self._job, self.settings, self._owns_pool = job, settings, owns_pool
        self._facts = facts(job, sources, settings)
        self._origins: dict[ModelStage, str] = {}
        manifest = None
        if resume is not None:
            manifest = Manifest.read(resume)
            manifest.require_same(self._facts, resume)
        self.steps_done = manifest.step if manifest else 0
        self.gate = Gate(settings.boundary_s)
        self.fleet = Fleet(pool, sources, settings.step_s)
        self._supply = Supply(job.cluster.devices, self.fleet)
        self.engines: RolloutJob | None = None
        """What generates, where the seats do not."""
        self._factory = engines
        follows = job.workload if engines is None else without_generation(job.workload)
        self.weights = Weights(
            self.fleet, follows, job.precision.param_bytes, settings.bucket_bytes
        )
        self._steps = Steps(job, self.fleet, self.gate, task, settings)
        self._rollout: Rollout | None = None
        self.last: Rollout | None = None
        """Of the step completed last."""
        self.served: dict[UnitId, int] = {}
        """Weight version that each unit generated the last rollout with."""
        self._seen: Observation | None = None
        self._lock = threading.RLock()
        try:
            if plan is None:
                self.steps_done = adopt(self.fleet)
                self._left_behind()  # whoever missed an update of the step that was under way
            else:
                self.fleet.start(job.cluster.healthy)
                self._build(plan, manifest, resume)
                if engines is not None:
                    trainer = SeatTrainer(self)
                    self.engines = RolloutJob(
                        job, plan, engines, trainer, gate=self.gate, wait_s=settings.step_s
                    )
                    self._steps.engines = self.engines
                self.relink()
        except BaseException:
            self.close()
            raise

    def _build(self, plan: Plan, manifest: Manifest | None, folder: Path | None) -> None:
        for stage, placement in plan.items():
            if stage == ACTOR_GENERATE and self._factory is not None:
                continue
            units = tuple(
                Unit(UnitId(stage, serial), placement.layout, devices)
                for serial, devices in enumerate(placement.units)
            )
            if manifest is None or folder is None or stage not in manifest.stages:
                self.fleet.build(units)
            else:
                restore(self.fleet, units, manifest.stages[stage], folder, self.settings.transfer_s)
        if manifest is not None and folder is not None:
            for stage, digest in manifest.origins.items():
                require_origin(self.fleet, stage, digest, folder)
                self._origins[stage] = digest

    # --- Reading ------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """Static facts, on the cluster as it is now."""
        return self._job.on(self._job.cluster.without(self.failed))

    @property
    def failed(self) -> frozenset[Device]:
        """Devices whose seats are gone."""
        return self._supply.failed

    @property
    def units(self) -> UnitMap:
        """Units alive."""
        return self.fleet.units if self.engines is None else self.engines.units

    @property
    def draining(self) -> frozenset[Device]:
        """Devices that will leave once no unit is on them."""
        return self._supply.draining

    def item_bytes(self, stage: Stage) -> dict[Slot, int]:
        """Bytes of one element of every slot that a stage keeps."""
        precision = self._job.precision
        return {
            slot: precision.param_bytes if slot is Slot.PARAM else precision.moment_bytes
            for slot in slots_of(stage)
        }

    def observe(self) -> Observation:
        """Return what was seen since the last call; touches no seat."""
        with self._lock:
            seen, self._seen = self._seen, None
        healthy = frozenset(self.job.cluster.healthy)
        if seen is None:
            return nothing_seen(self.steps_done - 1, healthy=healthy, draining=self.draining)
        return replace(seen, healthy=healthy, draining=self.draining)

    # --- Steps --------------------------------------------------------------------------------

    def step(self) -> Mapping[str, float]:
        """Run one RL step, or the rest of the one that was cut short.

        Returns:
            The job's own figures: reward, and loss, grad_norm ... of every trained model.

        Raises:
            UnitLost: a seat ended; names units lost and intact. Once units are replaced, call
                again.
        """
        with self.gate.step():
            start_s = time.perf_counter()
            self._reap()
            if self.fleet.unheard:
                raise UnitLost(self.fleet.unheard, tuple(self.units), "before the step")
            try:
                rollout = self._run()
            except Exception as error:
                self._cut_short(error)
                raise
            self._follow_pool()
            self._finish(rollout, time.perf_counter() - start_s)
            return self._seen.metrics if self._seen is not None else {}

    def _run(self) -> Rollout:
        self._steps.stage_s.clear()
        if self._rollout is None:
            self._rollout = self._steps.begin(self.steps_done)
        rollout = self._rollout
        self.fleet.link()
        if rollout.generated is None:
            self._synchronize()
            self.served = {
                u.id: self._version(u)
                for stage in self.units.stages()
                if stage.stage is Stage.GENERATE
                for u in self.units.of(stage)
            }
        self._steps.generate(rollout)
        self._steps.score(rollout)
        self._steps.train(rollout)
        self._synchronize()
        return rollout

    def _version(self, unit: Unit) -> int:
        """Return the version of a generating unit's weights."""
        if self.engines is not None:
            return self.engines.version_of(unit.id)
        return int(self.fleet.counters(unit)["weight_version"])

    def _synchronize(self) -> None:
        pairs = self.weights.followers()
        stages = {stage for pair in pairs for stage in pair}
        if self.engines is not None:
            stages |= {ACTOR_TRAIN, ACTOR_GENERATE}
        with self.gate.stages(*sorted(stages)):
            self.weights.synchronize()
            if self.engines is not None:
                self.engines.sync()

    def _reap(self) -> list[UnitId]:
        """Forget units that have lost a seat; return them."""
        lost = [u.id for u in self.fleet.reap()]
        if self.engines is not None:
            gone = self.engines.reap()
            self.fleet.unheard += gone
            lost += gone
        return lost

    def _cut_short(self, error: Exception) -> None:
        """After a failure: forget broken groups, keep units of one mind, name what is lost."""
        self.fleet.unlinked()
        self.weights.forget()
        lost = self._reap()
        lost += [u.id for u in self._left_behind()]
        if lost:
            raise UnitLost(lost, tuple(self.units), str(error)) from error

    def _left_behind(self) -> tuple[Unit, ...]:
        """Drop train units that missed an update which others made; return them."""
        behind: list[Unit] = []
        for stage in self.units.stages():
            if stage.stage is not Stage.TRAIN:
                continue
            steps = {u: self._steps_of(u) for u in self.units.of(stage)}
            whole = [min(s) for s in steps.values() if len(s) == 1]
            newest = max(whole, default=-1)
            behind += [u for u, s in steps.items() if s != {newest}]
            if self._rollout is not None and newest <= self._rollout.step:
                self._rollout.metrics.pop(stage.model, None)
        self.fleet.discard(behind)
        return tuple(behind)

    def _steps_of(self, unit: Unit) -> set[int]:
        """Optimizer steps of a unit's ranks: one number, or more when it broke in between."""
        calls = self.fleet.send({unit.id: {}}, "counters")
        return {int(a.value["step"]) for a in self.fleet.settle(calls, self.settings.step_s)}

    def _finish(self, rollout: Rollout, step_s: float) -> None:
        peaks, figures = self.peak_bytes(), dict[str, float]()
        if self.engines is not None:
            signals = self.engines.fleet.signals()
            peaks, figures = with_engines(peaks, signals), figures_of(signals)
        seen = seen_in(
            rollout,
            step_s=step_s,
            stage_s=self._steps.stage_s,
            peak_bytes=peaks,
            healthy=self.job.cluster.healthy,
            draining=self.draining,
            max_response_tokens=self.job.max_response_tokens,
            engines=figures,
        )
        with self._lock:
            self._seen = seen
        self.last, self._rollout = rollout, None
        self.steps_done += 1

    def save(self, folder: Path) -> None:
        """Write the state after the step done last; ``folder`` appears at once and complete.

        Raises:
            CheckpointError: it cannot be written, or a step was cut short and is to be finished.
            UnitLost: a seat ended; names units lost and intact.
        """
        with self.gate.step():
            if self._rollout is not None:
                raise CheckpointError(
                    folder, f"step {self.steps_done} was cut short", "run the step to its end first"
                )
            try:
                for stage in frozen(self._job):
                    if stage not in self._origins:
                        self._origins[stage] = origin(self.fleet, self.units.of(stage)[0])
                save(
                    self.fleet,
                    self._job,
                    folder,
                    plan=Plan.of_units(self.units),
                    about=self._facts,
                    step=self.steps_done,
                    origins=self._origins,
                    timeout_s=self.settings.transfer_s,
                )
            except Exception as error:
                self._cut_short(error)
                raise

    def peak_bytes(self) -> dict[Device, int]:
        """Return the peak of state bytes per seat since the last call."""
        alive = self.fleet.pool.alive
        calls = self.fleet.pool.send({d: ("memory", {"reset": True}) for d in alive})
        answers = self.fleet.settle(calls, self.settings.step_s)
        found: dict[Device, int] = {}
        for call, answer in zip(calls, answers, strict=True):
            memory: Memory = answer.value
            found[call.device] = memory.peak_bytes
        return found

    # --- Units and devices --------------------------------------------------------------------

    def relink(self) -> None:
        """Rebuild groups and routing for the units alive; losses count as heard."""
        self._reap()
        self.fleet.link()
        if self.engines is not None:
            self.engines.link()
        self.fleet.unpark()
        self.fleet.unheard = ()
        self._supply.retire(self.units)

    def _follow_pool(self) -> None:
        """Take up what the pool has learned about its devices."""
        pool = self.fleet.pool
        if leaving := pool.draining - self.draining:
            self.take(leaving)
        if back := pool.returned:
            self.give(back)

    def take(self, devices: Iterable[Device]) -> None:
        """Announce that devices will leave: once no unit is on them, their seats end."""
        self._supply.take(devices, self.units)

    def kill(self, device: Device) -> None:
        """End a seat without notice."""
        self.fleet.pool.kill(device)

    def give(self, devices: Iterable[Device]) -> None:
        """Devices are back: start their seats; returns when they are up."""
        self._supply.give(devices)

    def close(self) -> None:
        """End the job; its seats too when they are its own. Safe to call twice."""
        with ExitStack() as ending:  # the last first, each whatever becomes of another
            ending.callback(self._end_seats)
            if self._factory is not None:
                ending.callback(self._factory.close)
            if self.engines is not None:
                ending.callback(self.engines.close)

    def _end_seats(self) -> None:
        pool = self.fleet.pool
        if self._owns_pool:
            pool.close()
            return
        calls = pool.send({device: ("reset", {}) for device in pool.alive})
        self.fleet.settle(calls, self.settings.step_s)
