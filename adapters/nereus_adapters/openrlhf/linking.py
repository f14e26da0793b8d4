"""Linking: the epoch switch of a transition, and the way back when it fails.

While primitives run, groups that change are parked in host memory and engines that end are shut
down: devices are free at once. What the job steps on is built here, once, from what is parked.
Until that has worked nothing parked is let go, so that whatever fails - a rank that died, a
broadcast that hangs - the old layout is built from it again, in new processes where need be.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

from ray.exceptions import RayError

from nereus_adapters.openrlhf import engines, groups, joining, ranks, warm
from nereus_adapters.openrlhf.checks import refuse_unbuildable
from nereus_adapters.openrlhf.groups import Parked
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.ray_calls import ask, outcome
from nereus_core.cluster import Device
from nereus_core.errors import Infeasible, NereusError, NotAtBoundary, TransitionFailed
from nereus_core.primitives import Primitive, created, ended, model_stage_of
from nereus_core.units import Unit, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Job, ModelStage, Stage

FAILURES = (NereusError, RayError)


class Linking:
    """What of a job is parked, and how it stood when it was linked last."""

    def __init__(self, running: Running, job: Job) -> None:
        self._running, self._job = running, job
        self._lock = threading.RLock()
        self._parked: dict[ModelStage, Parked] = {}
        self._changed: set[ModelStage] = set()
        self._boundary = 0
        self._warms = False
        self._linked = running.alive
        self._broken_by: Exception | None = None
        wanted = running.section.warm_engines
        self._num_seats = len(running.engines) if wanted is None else wanted
        self.resting = UnitMap()
        """Units that ended and that others may still be made from, until the job is linked."""

    @property
    def broken(self) -> bool:
        """Whether the way back has failed: what is parked is all there is of the job's state."""
        return self._broken_by is not None

    def warm(self) -> None:
        """Have seats wait for engines to come, from now on."""
        self._warms = True
        warm.replenish(self._running, self._num_seats)

    def heed(self, leaving: frozenset[Device], asked_back: frozenset[Device]) -> None:
        """Leave no process that waits for a unit on devices that are to be left.

        Where a change has not been linked yet, linking does.
        """
        with self._lock:
            before, self._running.leaving = self._running.leaving, leaving
            self._running.asked_back = asked_back
            if self._changed:
                return
            joining.give_back(self._running)  # what joined for a change that had ended by then
            if leaving == before:
                return
            groups.retire(self._running)
            if self._warms:
                self.warm()

    def parked(self, stage: ModelStage) -> Parked | None:
        """Return what a stage has left in host memory; None while its group stands."""
        return self._parked.get(stage) if stage in self._changed else None

    def enter(self, lost: Collection[Unit]) -> None:
        """Begin a boundary; copies of groups that went on without it are worth nothing.

        Args:
            lost: Units that a device took with it. What is left of their stages is linked anew; a
                stage that trains has lost state, and stays as it is.
        """
        running = self._running
        with self._lock:
            self._boundary += 1
            self._drop_copies()
            lost = [unit for unit in lost if unit.model_stage.stage is not Stage.TRAIN]
            ids = [unit.id for unit in lost]
            engines.forget(running, ids)
            groups.forget(running, lost)
            running.alive = running.alive.replace(ids, ())
            self._linked = self._linked.replace(ids, ())
            for stage in sorted({unit.model_stage for unit in lost}):
                if running.alive.of(stage):
                    try:
                        self._vacate(stage)
                    except FAILURES:  # they may wait for one that is gone; they hold no state
                        groups.kill(running, stage)

    def leave(self) -> None:
        """Build what changed and end a boundary: a primitive that goes on later changes nothing.

        What keeps the job from being linked is raised by what went wrong before.
        """
        with self._lock:
            try:
                if not self.broken:
                    with suppress(NereusError):
                        self.link()
                    joining.give_back(self._running)  # also of a change that never came to that
            finally:
                self._boundary += 1
                self._drop_copies()

    @property
    def boundary(self) -> int:
        """Number of the boundary that is open, for `park` and `commit`."""
        return self._boundary

    def park(self, op: Primitive, boundary: int) -> int:
        """Copy a group's state to host memory, once a transition; returns its bytes.

        The group stands, and goes on where no primitive is committed. Its copy stays until the job
        is linked or the boundary ends: another primitive of the stage may count on it.

        Raises:
            NotAtBoundary: the boundary that the primitive began in has ended.
        """
        with self._lock:
            self._require_open(op, boundary)
            return self._copy(model_stage_of(op))

    def commit(self, op: Primitive, boundary: int, resting: Collection[Unit] = ()) -> None:
        """Free a group's memory, once a transition, and change the units that are alive.

        Args:
            op: The primitive; engines that it ends are shut down.
            boundary: In which it began.
            resting: Units that others may be made from, until the job is linked.

        Raises:
            NotAtBoundary: the boundary that the primitive began in has ended; nothing has changed.
        """
        running = self._running
        with self._lock:
            self._require_open(op, boundary)
            self._vacate(model_stage_of(op))
            running.alive = running.alive.replace(ended(op), created(op))
            engines.stop(running, [u for u in running.engines if u not in running.alive])
            self.resting = self.resting.replace((), resting)

    def _require_open(self, op: Primitive, boundary: int) -> None:
        if boundary != self._boundary:
            raise NotAtBoundary(f"{op}, begun in a boundary that has ended, goes on", op)

    def _copy(self, stage: ModelStage) -> int:
        if stage == ACTOR_GENERATE or stage in self._parked:
            return 0
        parked = groups.hand_out(self._running, stage)
        self._parked[stage] = parked
        return parked.num_bytes

    def _vacate(self, stage: ModelStage) -> None:
        if stage in self._changed:
            return
        self._copy(stage)  # a look at the job may have dropped the copy
        self._changed.add(stage)
        if stage != ACTOR_GENERATE:
            groups.vacate(self._running, stage)

    def _drop_copies(self) -> None:
        for stage in [s for s in self._parked if s not in self._changed]:
            del self._parked[stage]

    def link(self) -> int:
        """Build what changed for the units alive; returns bytes of state that ranks took in.

        Raises:
            TransitionFailed: it could not be built; says whether the old layout is back.
        """
        with self._lock:
            self._drop_copies()
            return self._link() if self._changed else 0

    def _link(self) -> int:
        if self._broken_by is not None:  # somebody tries again what could not be built before
            self._back(self._broken_by, anew=True)
        try:
            refuse_unbuildable(self._running, self._job)
        except Infeasible as error:
            self._back(error, anew=False)
        try:
            taken = self._build(self._changed)
        except FAILURES as error:
            self._back(error, anew=True)
        self._linked = self._running.alive
        self._forget()
        self._settle()
        return taken

    def _settle(self) -> None:
        """Keep processes and devices for what stands now, and no others."""
        groups.retire(self._running)
        joining.give_back(self._running)
        self.warm()

    def _build(self, stages: Collection[ModelStage]) -> int:
        taken, weights = 0, not set(stages).isdisjoint((ACTOR_GENERATE, ACTOR_TRAIN))
        if weights:
            engines.start_missing(self._running)  # they load while groups are built
        for stage in sorted(set(stages) - {ACTOR_GENERATE}):
            taken += groups.seat(self._running, stage, self._parked[stage])
        if weights:
            engines.await_all(self._running)
            engines.tie(self._running)
        self._publish()
        return taken

    def _publish(self) -> None:
        """Tell processes that hold handles of their own, where whoever attached provides for it."""
        running = self._running
        directory = getattr(running.trainer, "nereus_directory", None)
        if directory is None:
            return
        handles = {first: running.handles(stage) for stage, first in running.first.items()}
        told = directory.publish.remote(list(running.trainer.vllm_engines), handles)
        outcome(told, "the directory of ranks and engines", running.section.call_s)

    def _back(self, cause: Exception, *, anew: bool) -> NoReturn:
        """Build the layout that was linked last from what is parked.

        Args:
            cause: Why.
            anew: In new processes, for those that are there may hang.
        """
        running, intact = self._running, tuple(self._linked)
        running.alive = self._linked
        try:
            if anew:
                running.cold = True
                self._end_processes()
            self._build(self._changed)
        except FAILURES as error:
            self._broken_by = error
            raise TransitionFailed("the way back", error, intact=()) from cause
        self._forget()
        self._settle()
        raise TransitionFailed("linking", cause, intact=intact, rolled_back=True) from cause

    def _end_processes(self) -> None:
        """End every process of what changed, and let the rest come to itself."""
        running = self._running
        for stage in sorted(self._changed - {ACTOR_GENERATE}):
            groups.kill(running, stage)
        if self._changed.isdisjoint((ACTOR_GENERATE, ACTOR_TRAIN)):
            return
        engines.kill_all(running)
        if ACTOR_TRAIN not in self._parked:  # its rank 0 may still wait for an engine that died
            ask(
                running.handles(ACTOR_TRAIN),
                ranks.idle,
                awaited="the actor's ranks to give the old weight-sync group up",
                timeout_s=running.section.start_s,
            )

    def _forget(self) -> None:
        self._parked.clear()
        self._changed.clear()
        self._broken_by = None
        self._running.cold = False
        self.resting = UnitMap()
