"""OpenRLHFAdapter: the four primitives as changes of a live job's groups and engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from nereus_adapters.openrlhf import CAPABILITIES, joining, lock, parking
from nereus_adapters.openrlhf.checks import refuse
from nereus_adapters.openrlhf.groups import steps_of
from nereus_adapters.openrlhf.inside import peak_bytes
from nereus_adapters.openrlhf.linking import Linking
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.openrlhf.supply import Supply
from nereus_adapters.openrlhf.zero import counters_inside
from nereus_adapters.ray_calls import ask
from nereus_core.adapter import Boundary, Fingerprint
from nereus_core.cluster import Device
from nereus_core.device_specs import CPU_SEAT
from nereus_core.ledger import Done, Ledger, Standing
from nereus_core.ledger_adapter import LedgerAdapter, alive, require_plan
from nereus_core.observation import Observation, TokenStats, clip_ratio
from nereus_core.phases import Enter, Phase
from nereus_core.plan import Plan
from nereus_core.primitives import Destroy, Primitive, created
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage, Stage


class OpenRLHFAdapter(LedgerAdapter):
    """Translates the four primitives. Implements `nereus_core.adapter.Adapter`.

    A primitive on a group parks it: its state goes to host memory and its devices are free. A
    primitive on engines ends those that end. `relink` then builds, once, what the units alive say.
    """

    name = "openrlhf"

    def __init__(self, running: Running, job: Job, version: str, supply: Supply) -> None:
        super().__init__(Ledger(CAPABILITIES, backend_version=version))
        self._running, self._job, self._supply = running, job, supply
        self._linking = Linking(running, job)

    def warm(self) -> None:
        """Have processes wait for engines to come; in a job that is to be changed."""
        self._linking.warm()

    # --- Reading --------------------------------------------------------------------------------

    def job(self) -> Job:
        """Static facts; devices whose node is gone, or that Ray no longer has free, are marked."""
        return self._job_without(self._supply.gone())

    def _job_without(self, gone: frozenset[Device]) -> Job:
        running, cluster = self._running, self._job.cluster
        known = running.devices.union(cluster.devices)
        absent = running.met - running.offered - running.bundles.keys()
        if known == set(cluster.devices) and not gone:
            return self._job
        whole = replace(cluster, devices=tuple(sorted(known)))
        return self._job.on(whole.without(gone | absent))

    def units(self) -> UnitMap:
        """Units alive now."""
        return self._intact(self._lost(self._supply.gone()))

    def _intact(self, lost: Iterable[Unit]) -> UnitMap:
        return self._running.alive.replace([unit.id for unit in lost], ())

    def _lost(self, gone: frozenset[Device]) -> list[Unit]:
        """Units gone with devices. A group that lost a rank is: ZeRO keeps each part once."""
        alive = self._running.alive.values()
        hit = [unit for unit in alive if not gone.isdisjoint(unit.devices)]
        broken = {unit.model_stage for unit in hit if unit.model_stage.stage is Stage.TRAIN}
        return [unit for unit in alive if unit in hit or unit.model_stage in broken]

    def observe(self) -> Observation:
        """Drain what was heard since the last call; what waits on devices asked back, ends."""
        heard = self._running.signals.drain()
        supply, running = self._supply, self._running
        self._linking.heed(supply.leaving(), supply.asked_back())
        joining.look(running, running.leaving | supply.gone(), supply.draining_nodes())
        return Observation(
            step=heard.step,
            step_s=heard.step_s,
            stage_s=heard.stage_s,
            prompt_tokens=heard.prompts,
            response_tokens=TokenStats.of(heard.responses),
            peak_bytes=self._peaks(),
            healthy=frozenset(self.job().cluster.healthy),
            draining=running.leaving,
            metrics=heard.metrics,
            clip_ratio=clip_ratio(heard.responses, self._job.max_response_tokens),
        )

    def _peaks(self) -> dict[Device, int]:
        """Most bytes that torch allocated on the device of each rank; ranks are idle here."""
        if self._job.cluster.device_spec.name == CPU_SEAT.name:
            return {}
        found: dict[Device, int] = {}
        for stage in self._running.groups:
            peaks = ask(self._running.handles(stage), peak_bytes, awaited="peak memory of ranks",
                        timeout_s=self._running.section.call_s)  # fmt: skip
            for device, peak in zip(self._running.devices_of(stage), peaks, strict=True):
                found[device] = found.get(device, 0) + (peak or 0)
        return found

    def fingerprint(self, unit: UnitId) -> Fingerprint:
        """Digest what the units of a train stage hold together: ZeRO shares it out among them.

        Stages without state of their own have nothing to digest: the reference comes from its
        folder, and engines get the actor's weights when the job is linked.
        """
        stage, running = unit.model_stage, self._running
        alive(unit, running.alive)
        if stage.stage is not Stage.TRAIN:
            return Fingerprint(unit, {}, {})
        if (parked := self._linking.parked(stage)) is not None:
            return Fingerprint(unit, parked.digests, parked.steps)
        handles, call_s = running.handles(stage), running.section.call_s
        parts = ask(handles, parking.digests, awaited=f"digests of {stage}", timeout_s=call_s)
        (counters,) = ask(
            handles[:1], counters_inside, awaited=f"counters of {stage}", timeout_s=call_s
        )
        return Fingerprint(unit, parking.summed(parts), steps_of(counters))

    # --- Boundary -------------------------------------------------------------------------------

    @contextmanager
    def boundary(self, stages: Collection[ModelStage], *, timeout_s: float) -> Iterator[Boundary]:
        """Hold stages at the safe boundary: after training and weight synchronization.

        An asynchronous job's generator is held by the lock that OpenRLHF has for its broadcast.
        """
        held = self._running.gate.close_on(stages, timeout_s)
        try:
            with lock.held(self._running.trainer, stages, timeout_s):
                try:
                    self._linking.enter(self._lost(self._supply.gone()))
                    yield Boundary(held, self._running.signals.step + 1)
                finally:
                    self._linking.leave()
        finally:
            self._running.gate.open()

    def relink(self, plan: Plan) -> None:
        """Build groups and engines for the units alive.

        Raises:
            PlanError: the units alive are not the plan's.
            TransitionFailed: it could not be built; says whether the old layout is back.
        """
        gone = self._supply.gone()
        require_plan(plan, self._job_without(gone), self._intact(self._lost(gone)))
        self._linking.link()

    # --- Primitives -----------------------------------------------------------------------------

    def _standing(self) -> Standing:
        gate, gone = self._running.gate, self._supply.gone()  # one look at Ray for all of it
        lost = self._lost(gone)
        return Standing(
            self._job_without(gone),
            self._intact(lost),
            gate.held,
            gate.inside,
            self._linking.resting,
            [unit.id for unit in lost],
        )

    def _do(self, op: Primitive, units: UnitMap, enter: Enter) -> Done:
        boundary = self._linking.boundary
        enter(Phase.PREPARE)
        refuse(op, self._running)
        for unit in created(op):
            joining.take(self._running, unit.devices, lambda: self._linking.boundary == boundary)
        enter(Phase.TRANSFER)
        moved_bytes = self._linking.park(op, boundary)
        enter(Phase.VERIFY)
        enter(Phase.COMMIT)
        resting = [units[op.unit]] if isinstance(op, Destroy) and op.park else []
        self._linking.commit(op, boundary, resting)
        enter(Phase.RELEASE)
        return Done(moved_bytes)
