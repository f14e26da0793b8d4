"""Trials: seeded transitions with one fault in each, over any harness, and what became of them.

A trial launches a job, takes a step, and has a controller carry out a transition while a fault
strikes. Then the job must step on with exactly the state that an uninterrupted run holds (SHA-256
of every tensor of every unit), or stop with a named error; in either case before the time is up.

    python -m nereus_conformance.trials --adapter sim --trials 2000 --json
    python -m nereus_conformance.trials --adapter sim --matrix conformance/README.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from nereus_conformance import hookspecs
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
from nereus_core.primitives import OpId, touched
from nereus_core.registry import Registry
from nereus_core.transition import Journal, compile_transition
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, ModelStage

KILL_CONTROLLER, CANCEL = "kill the controller", "cancel"
FAULTS: tuple[str, ...] = (*Fault, KILL_CONTROLLER, CANCEL)
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


class ControllerKilled(BaseException):
    """The controller's process is gone: nothing that is an Exception is caught by anybody."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is launched, where it shall go, and what goes wrong."""

    before: Plan
    after: Plan
    fault: str
    phase: Phase
    op_index: int

    def __str__(self) -> str:
        where = f"{self.phase} of primitive {self.op_index}"
        return f"{self.fault} in {where}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a trial."""

    trial: Trial
    outcome: str
    problem: str | None
    """What must not be: lost state, a hang, an error without a name. None is good."""
    elapsed_s: float


class Tripwire(Journal):
    """A journal that does something as a phase of the n-th primitive is announced."""

    def __init__(self, path: Path, op_index: int, phase: Phase, then: Callable[[], None]) -> None:
        super().__init__(path)
        self._order: list[OpId] = []
        self._at, self._then = (op_index, phase), then

    def enter(self, op_id: OpId, phase: Phase) -> None:
        """Announce a phase; the wire is tripped once it is on disk."""
        super().enter(op_id, phase)
        if op_id not in self._order:
            self._order.append(op_id)
        if (self._order.index(op_id), phase) == self._at:
            self._at = (-1, phase)
            self._then()


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
        self._job = harness.job()
        self._count = 0
        self._fixed: StepResult | None = None

    def draw(self, seed: int) -> Trial:
        """Draw a trial."""
        rng = random.Random(seed)
        while True:
            before, after = self._plan(rng), self._plan(rng)
            num_ops = len(compile_transition(_units(before), after, self._job, prefix="t").ops)
            if num_ops:
                break
        fault, phase = rng.choice(FAULTS), rng.choice(list(Phase))
        return Trial(before, after, fault, phase, rng.randrange(num_ops))

    def _plan(self, rng: random.Random) -> Plan:
        devices = self._job.cluster.healthy
        while True:
            placed = {}
            for stage in self._job.workload.stages:
                layout = rng.choice(LAYOUTS)
                most = len(devices) // layout.num_devices
                dp = rng.choice([most, rng.randint(1, most)])
                chosen = rng.sample(devices, dp * layout.num_devices)
                placed[stage] = Placement.packed(layout, tuple(sorted(chosen)))
            if not plan_problems(plan := Plan(placed), self._job):
                return plan

    def run(self, trial: Trial) -> Result:
        """Run one."""
        fixed = self._fixed_step(trial.before)
        begin_s = time.monotonic()
        adapter = self._harness.launch(self._job, trial.before)
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
                outcome = _outcome(events)
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

        if trial.fault in (KILL_CONTROLLER, CANCEL):
            journal: Journal = Tripwire(path, trial.op_index, trial.phase, trip)
        else:
            journal = Journal(path)
            device = _device(trial, adapter, self._job)
            self._harness.fail_at(Fault(trial.fault), trial.op_index, trial.phase, device)
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
            self._harness.launch(self._job, plan)
            self._harness.step()
            self._fixed = self._harness.step()
        return self._fixed

    def _changed(
        self, adapter: Adapter, wanted: Mapping[ModelStage, str], *, resumed: bool = False
    ) -> str | None:
        """Say which unit alive holds other state than its stage had.

        Stages that follow a train stage take its weights in the next step of a resumed job.
        """
        follows = {n.model_stage for n in self._job.workload.nodes if n.weights_from is not None}
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


def _outcome(events: Iterable[Event]) -> str:
    """Say in a word or two how a trial went on."""
    ended = [e.outcome for e in events if isinstance(e, TransitionFinished)]
    recovered = [e.outcome for e in events if isinstance(e, Recovered)]
    if recovered:
        return recovered[0]
    if "rolled_back" in ended:
        return "old plan goes on"
    return "goes through" if ended == ["done"] else "replanned"


# --- The fault matrix ---------------------------------------------------------------------------


def matrix(trials: Trials, job: Job) -> dict[str, dict[str, str]]:
    """Run every fault in every phase, with a second copy of the state and without; by title."""
    d = job.cluster.healthy
    one, two = Layout(1, 1), Layout(2, 1)
    rest = {
        ACTOR_GENERATE: Placement(one, ((d[2],), (d[3],))),
        REF_INFER: Placement(one, ((d[2],), (d[3],))),
    }
    arrangements = {
        "two copies, merged": (Placement(one, ((d[0],), (d[1],))), Placement(two, (d[:2],))),
        "one copy, split": (Placement(two, (d[:2],)), Placement(one, ((d[0],), (d[1],)))),
    }
    return {
        f"{fault}, {title}": {
            phase: _cell(
                trials.run(
                    Trial(
                        Plan({ACTOR_TRAIN: before, **rest}),
                        Plan({ACTOR_TRAIN: after, **rest}),
                        fault,
                        phase,
                        0,
                    )
                )
            )
            for phase in Phase
        }
        for fault in FAULTS
        for title, (before, after) in arrangements.items()
    }


def _cell(result: Result) -> str:
    return result.outcome if result.problem is None else f"WRONG: {result.problem}"


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """Write a matrix as a table in Markdown."""
    head = ["fault", *Phase]
    rows = [[name, *cells.values()] for name, cells in found.items()]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def marks(adapter: str, tier: str) -> tuple[str, str]:
    """Return the lines between which the README has the matrix of an adapter."""
    return f"<!-- matrix {adapter} {tier} -->", f"<!-- end {adapter} {tier} -->"


def replaced(text: str, adapter: str, tier: str, rows: str) -> str:
    """Put a matrix between its marks; raises ValueError where the text has none."""
    begin, end = marks(adapter, tier)
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"no line {begin!r} followed by {end!r}")
    return f"{head}{begin}\n{rows}\n{end}{tail}"


def report(results: Sequence[Result], elapsed_s: float) -> dict[str, object]:
    """Sum trials up."""
    wrong = [r for r in results if r.problem]
    return {
        "trials": len(results),
        "wrong": [f"{r.trial}: {r.problem}" for r in wrong],
        "outcomes": dict(Counter(r.outcome for r in results).most_common()),
        "by_fault": {
            fault: dict(Counter(r.outcome for r in results if r.trial.fault == fault))
            for fault in FAULTS
        },
        "slowest_s": round(max((r.elapsed_s for r in results), default=0.0), 3),
        "elapsed_s": round(elapsed_s, 1),
    }


def harness_of(
    adapter: str, tier: str, options: Mapping[str, str] = MappingProxyType({})
) -> Harness:
    """Ask an installed adapter for its harness; raises NereusError where it has none.

    Options are those of `nereus_conformance.hookspecs`.
    """
    registry = Registry.load()
    registry.add_hookspecs(hookspecs)
    found: Harness | None = registry.ask(
        adapter, "nereus_conformance_harness", tier=tier, options=options
    )
    if found is None:
        raise NereusError(f"adapter {adapter!r} has no harness for tier {tier!r}.")
    return found


def main() -> int:
    """Run trials, or the matrix; says by its exit code whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", default="sim")
    parser.add_argument("--tier", default="contract")
    parser.add_argument("--harness", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--matrix", metavar="README", help="write the fault matrix into this file")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    options = dict(text.partition("=")[::2] for text in chosen.harness)
    harness = harness_of(chosen.adapter, chosen.tier, options)
    with closing(harness), tempfile.TemporaryDirectory() as folder:
        trials = Trials(harness, Path(folder))
        if chosen.matrix:
            rows = table(matrix(trials, harness.job()))
            path = Path(chosen.matrix)
            text = replaced(path.read_text("utf-8"), chosen.adapter, chosen.tier, rows)
            path.write_text(text, "utf-8")
            print(rows)
            return "WRONG" in rows
        begin_s = time.monotonic()
        seeds = range(chosen.seed, chosen.seed + chosen.trials)
        found = report([trials.run(trials.draw(s)) for s in seeds], time.monotonic() - begin_s)
    print(json.dumps(found, indent=None if chosen.json else 2))
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
