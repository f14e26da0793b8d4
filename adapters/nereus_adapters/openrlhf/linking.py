"""Linking: the epoch switch of a transition, and the way back when it fails.

While primitives run, groups that change are parked in host memory and engines that end are shut
down: devices are free at once. What the job steps on is built here, once, from what is parked.
Until that has worked nothing parked is let go, so that whatever fails - a rank that died, a
broadcast that hangs - the old layout is built from it again, in new processes where need be.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import NoReturn

from ray.exceptions import RayError

from nereus_adapters.openrlhf import engines, groups, ranks, warm
from nereus_adapters.openrlhf.checks import refuse_indivisible
from nereus_adapters.openrlhf.groups import Parked
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.ray_calls import ask, outcome
from nereus_core.errors import Infeasible, NereusError, TransitionFailed
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Job, ModelStage

FAILURES = (NereusError, RayError)


class Linking:
    """What of a job is parked, and how it stood when it was linked last."""

    def __init__(self, running: Running, job: Job) -> None:
        self._running, self._job = running, job
        self._lock = threading.RLock()
        self._parked: dict[ModelStage, Parked] = {}
        self._changed: set[ModelStage] = set()
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
        """Have seats wait for engines to come."""
        warm.replenish(self._running, self._num_seats)

    def parked(self, stage: ModelStage) -> Parked | None:
        """Return what a stage has left in host memory; None while its group stands."""
        return self._parked.get(stage)

    def park(self, stage: ModelStage) -> int:
        """Copy a group's state to host memory, once a transition; returns its bytes.

        The group stands, and goes on where the primitive is not committed (`discard`).
        """
        with self._lock:
            if stage == ACTOR_GENERATE or stage in self._parked:
                return 0
            parked = groups.hand_out(self._running, stage)
            self._parked[stage] = parked
            return parked.num_bytes

    def discard(self, stage: ModelStage) -> None:
        """Forget the copy of a group that still stands."""
        with self._lock:
            if stage not in self._changed:
                self._parked.pop(stage, None)

    def vacate(self, stage: ModelStage) -> None:
        """Free the memory of a group that was parked, once a transition."""
        with self._lock:
            if stage in self._changed:
                return
            self._changed.add(stage)
            if stage != ACTOR_GENERATE:
                groups.vacate(self._running, stage)

    def switch(self, ended: Collection[UnitId], made: Collection[Unit]) -> None:
        """Change the units that are alive; engines without a unit end."""
        running = self._running
        with self._lock:
            running.alive = running.alive.replace(ended, made)
            engines.stop(running, [u for u in running.engines if u not in running.alive])

    def rest(self, unit: Unit) -> None:
        """Let others be made from a unit that has ended, until the job is linked."""
        with self._lock:
            self.resting = self.resting.replace((), [unit])

    def link(self) -> int:
        """Build what changed for the units alive; returns bytes of state that ranks took in.

        Raises:
            TransitionFailed: it could not be built; says whether the old layout is back.
        """
        if not self._changed:
            return 0
        if self._broken_by is not None:  # somebody tries again what could not be built before
            self._back(self._broken_by, anew=True)
        try:
            refuse_indivisible(self._running, self._job)
        except Infeasible as error:
            self._back(error, anew=False)
        try:
            taken = self._build(self._changed)
        except FAILURES as error:
            self._back(error, anew=True)
        self._linked = self._running.alive
        self._forget()
        groups.retire(self._running)
        self.warm()
        return taken

    def _build(self, stages: Collection[ModelStage]) -> int:
        taken, weights = 0, not set(stages).isdisjoint((ACTOR_GENERATE, ACTOR_TRAIN))
        if weights:
            engines.start_missing(self._running)  # they load while groups are built
        for stage in sorted(set(stages) - {ACTOR_GENERATE}):
            # A stage whose parking failed still stands: it is built again when it is parked.
            if (parked := self._parked.get(stage)) is not None:
                taken += groups.seat(self._running, stage, parked)
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
        self.warm()
        raise TransitionFailed("linking", cause, intact=intact, rolled_back=True) from cause

    def _end_processes(self) -> None:
        """End every process of what changed, and let the rest come to itself."""
        running = self._running
        for stage in sorted(self._changed.intersection(self._parked)):
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
