"""One trial: a seeded transition with one fault in it, over any harness, and what became of it.

A trial launches a job, takes a step, and has a controller carry out a transition while a fault
strikes. Then the job must step on with exactly the state that an uninterrupted run holds (SHA-256
of every tensor of every unit), or stop with a named error; in either case before the time is up.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from nereus_conformance.points import (
    FAULTS,
    KILL_CONTROLLER,
    MOMENTS_SHARE,
    OF_CONTROLLER,
    ControllerKilled,
    Moment,
    Point,
    Tripwire,
)
from nereus_core.adapter import Adapter
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.errors import NereusError, SeatDead, StateLost, UnitLost
from nereus_core.events import Event, EventLog, Recovered, TransitionFinished
from nereus_core.harness import Fault, Harness, StepResult
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.primitives import touched
from nereus_core.transition import Journal, compile_transition
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage

LAYOUTS = (
    *[Layout(1, 1)] * 4,
    Layout(2, 1),
    Layout(2, 1),
    Layout(1, 2),
    Layout(2, 2),
    Layout(4, 1),
)
"""Drawn with equal odds: small ones more often, so that there are copies to go on from."""
TOLERANCE = 1e-9
"""Relative, of a loss in float64 that is summed in another order: TARGETS T11."""
ATTEMPTS = 3
"""Attempts at a step after a loss; as `nereus_core.runner.MAX_LOSSES_IN_A_ROW`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is launched, where it shall go, and what goes wrong."""

    before: Plan
    after: Plan
    fault: str
    point: Point
    """A moment only where the fault strikes the controller."""
    op_index: int

    def __str__(self) -> str:
        where = f"{self.point}"
        if isinstance(self.point, Phase):
            where += f" of primitive {self.op_index}"
        return f"{self.fault} in {where}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a trial."""

    trial: Trial
    outcome: str
    problem: str | None
    """What must not be: lost state, a hang, an error without a name. None is good."""
    elapsed_s: float


@runtime_checkable
class Keeps(Protocol):
    """What a harness has besides whose jobs can be saved: a lost state is then resumed."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the job; ``folder`` is replaced."""
        ...

    def resume(self, folder: Path) -> Adapter:
        """Start the job from a checkpoint, on other devices and in another layout."""
        ...


class Trials:
    """Runs trials on one harness.

    Args:
        harness: Launches the jobs.
        folder: For journals and checkpoints.
        limit_s: A trial that takes longer counts as a hang.
        hang_s: Wall seconds for the primitives of a transition.
    """

    def __init__(
        self, harness: Harness, folder: Path, *, limit_s: float = 60.0, hang_s: float = 20.0
    ) -> None:
        self._harness, self._folder = harness, folder
        self._limit_s, self._hang_s = limit_s, hang_s
        self.job = harness.job()
        self._count = 0
        self._fixed: StepResult | None = None

    def draw(self, seed: int) -> Trial:
        """Draw a trial."""
        rng = random.Random(seed)
        while True:
            before, after = self._plan(rng), self._plan(rng)
            num_ops = len(compile_transition(_units(before), after, self.job, prefix="t").ops)
            if num_ops:
                break
        fault, phase, number = rng.choice(FAULTS), rng.choice(list(Phase)), rng.randrange(num_ops)
        point: Point = phase
        if fault in OF_CONTROLLER and rng.random() < MOMENTS_SHARE:
            point = rng.choice(list(Moment))
        return Trial(before, after, fault, point, number)

    def _plan(self, rng: random.Random) -> Plan:
        devices = self.job.cluster.healthy
        while True:
            placed = {}
            for stage in self.job.workload.stages:
                layout = rng.choice(LAYOUTS)
                most = len(devices) // layout.num_devices
                dp = rng.choice([most, rng.randint(1, most)])
                chosen = rng.sample(devices, dp * layout.num_devices)
                placed[stage] = Placement.packed(layout, tuple(sorted(chosen)))
            if not plan_problems(plan := Plan(placed), self.job):
                return plan

    def run(self, trial: Trial) -> Result:
        """Run one."""
        fixed = self._fixed_step(trial.before)
        begin_s = time.monotonic()
        adapter = self._harness.launch(self.job, trial.before)
        self._harness.step()
        saved = self._folder / "saved"
        if isinstance(self._harness, Keeps):
            self._harness.save(saved)
        units = adapter.units()
        wanted = {stage: self._state(units.of(stage)[0].id) for stage in units.stages()}
        events: list[Event] = []
        outcome, problem = "", None
        with EventLog(None, time.monotonic) as log, ExitStack() as opened:
            log.subscribe(lambda event, at_s: events.append(event))
            try:
                controller = self._transition(trial, adapter, log, opened)
                controller.at_boundary()
                problem = self._changed(adapter, wanted)
                problem = problem or self._stepped(adapter, controller, wanted, fixed)
                outcome = _outcome(events, trial)
            except StateLost as error:
                outcome = "StateLost named"
                copies = [u for u in adapter.units() if str(u.model_stage) == str(error.stage)]
                problem = f"{error}, but {copies[0]} is intact" if copies else None
                if isinstance(self._harness, Keeps):
                    outcome = "StateLost named, resumed"
                    resumed = self._harness.resume(saved)
                    problem = problem or self._changed(resumed, wanted, resumed=True)
                    problem = problem or self._as_ever(self._harness.step(), fixed)
            except NereusError as error:
                outcome, problem = f"{type(error).__name__} named", self._changed(adapter, wanted)
            except Exception as error:  # whatever it is, it has no name of ours
                outcome, problem = "broken", f"{type(error).__name__}: {error}"
        elapsed_s = time.monotonic() - begin_s
        if elapsed_s > self._limit_s:
            problem = f"took {elapsed_s:.0f} s, more than {self._limit_s:g} s"
        return Result(trial, outcome, problem, elapsed_s)

    def _transition(
        self, trial: Trial, adapter: Adapter, log: EventLog, opened: ExitStack
    ) -> Controller:
        """Carry the transition out while the fault strikes; returns who goes on from there."""
        self._count += 1
        path = self._folder / f"journal-{self._count}"
        running: list[Controller] = []

        def trip() -> None:
            if trial.fault == KILL_CONTROLLER:
                raise ControllerKilled
            running[0].cancel()

        if trial.fault in OF_CONTROLLER:
            journal: Journal = Tripwire(path, trial.op_index, trial.point, trip)
        else:
            journal = Journal(path)
            device = _device(trial, adapter, self.job)
            phase = Phase(trial.point)
            self._harness.fail_at(Fault(trial.fault), trial.op_index, phase, device)
        opened.enter_context(closing(journal))
        running.append(self._controller(adapter, log, journal))
        try:
            running[0].go_to(trial.after, "a trial")
        except ControllerKilled:
            _wait_for_threads(self._limit_s)
            journal.close()
            again = opened.enter_context(closing(Journal(path)))
            running[0] = self._controller(adapter, log, again)
            running[0].recover()
        return running[0]

    def _controller(self, adapter: Adapter, log: EventLog, journal: Journal) -> Controller:
        config = NereusConfig.of(
            {"timeouts": {"primitive_s": self._hang_s, "boundary_s": self._limit_s}}
        )
        return Controller(adapter, config, log, lambda hook, **values: None, journal=journal)

    def _stepped(
        self,
        adapter: Adapter,
        controller: Controller,
        wanted: Mapping[ModelStage, str],
        fixed: StepResult,
    ) -> str | None:
        """Step as `nereus run` does; say what is wrong with the step."""
        for attempt in range(ATTEMPTS):
            try:
                result = self._harness.step()
                break
            except (UnitLost, SeatDead):
                if attempt + 1 == ATTEMPTS:
                    raise
                controller.at_boundary()
                if problem := self._changed(adapter, wanted):
                    return problem
        return self._as_ever(result, fixed)

    def _as_ever(self, result: StepResult, fixed: StepResult) -> str | None:
        """Say what is wrong with a step."""
        if (result.step, result.sample_ids) != (fixed.step, fixed.sample_ids):
            return f"step {result.step} consumed {result.sample_ids}, not {fixed.sample_ids}"
        for model, loss in fixed.losses.items():
            if abs(result.losses[model] - loss) > TOLERANCE * abs(loss):
                return f"the loss of {model} is {result.losses[model]!r}, uninterrupted {loss!r}"
        return None

    def _fixed_step(self, plan: Plan) -> StepResult:
        """Return the second step of an uninterrupted run; it is the same under every plan."""
        if self._fixed is None:
            self._harness.launch(self.job, plan)
            self._harness.step()
            self._fixed = self._harness.step()
        return self._fixed

    def _changed(
        self, adapter: Adapter, wanted: Mapping[ModelStage, str], *, resumed: bool = False
    ) -> str | None:
        """Say which unit alive holds other state than its stage had.

        Stages that follow a train stage take its weights in the next step of a resumed job.
        """
        follows = {n.model_stage for n in self.job.workload.nodes if n.weights_from is not None}
        for unit in adapter.units():
            if resumed and unit.model_stage in follows:
                continue
            if self._state(unit) != wanted[unit.model_stage]:
                return f"{unit} holds other state than the uninterrupted run"
        return None

    def _state(self, unit: UnitId) -> str:
        digest = hashlib.sha256()
        for name, array in sorted(self._harness.peek(unit).items()):
            digest.update(name.encode())
            digest.update(array.tobytes())
        return digest.hexdigest()


def _units(plan: Plan) -> UnitMap:
    return UnitMap(
        Unit(UnitId(stage, serial), placement.layout, devices)
        for stage, placement in plan.items()
        for serial, devices in enumerate(placement.units)
    )


def _device(trial: Trial, adapter: Adapter, job: Job) -> Device | None:
    """Return a device of the primitive to be struck."""
    graph = compile_transition(adapter.units(), trial.after, job, prefix="t0")
    return min(touched(graph.topological()[trial.op_index], graph.atlas))


def _wait_for_threads(timeout_s: float) -> None:
    """Wait for what the killed controller's primitives were doing: its threads die with it."""
    for thread in threading.enumerate():
        if thread.name.startswith("nereus t"):
            thread.join(timeout_s)


def _outcome(events: Iterable[Event], trial: Trial) -> str:
    """Say in a word or two how a trial went on."""
    ended = [e.outcome for e in events if isinstance(e, TransitionFinished)]
    recovered = [e.outcome for e in events if isinstance(e, Recovered)]
    if recovered:
        return recovered[0]
    if "rolled_back" in ended:
        return "old plan goes on"
    # Killed as the end is on disk, a controller leaves nothing to be recovered, and no event.
    past = trial.fault == KILL_CONTROLLER and trial.point is Moment.ENDED
    return "goes through" if ended == ["done"] or past else "replanned"
