"""Fault trials: a random transition, one fault in one phase of it, and the question what is left.

A trial is a function of its seed. It launches the harness's job under a random plan, runs a step,
lets one fault strike in the transition to another random plan, has a controller go on from what is
intact, and runs another step. What it asserts: the job goes on with the state it had, to the bit,
and with the losses of a run that nothing happened to; or it stops with StateLost, and then there
really is no copy left. Nothing ever waits without end.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nereus_core.adapter import Adapter
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.errors import NereusError, StateLost, TransitionFailed, UnitLost
from nereus_core.events import EventLog
from nereus_core.harness import Fault, Harness, StepResult
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy
from nereus_core.transition import compile_transition, execute
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Job, ModelStage, Stage

TOLERANCE = 1e-9
"""Relative, of losses in float64: sums over a batch are taken in another order."""
LIMIT_S = 120.0
"""A trial that takes longer counts as a hang; each wait inside has a limit far below. Chosen."""
_FORMS = ((1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1))
"""tp, pp, dp of plans on four devices."""


class TrialFailed(NereusError):
    """What must never happen has happened; says in which trial."""

    def __init__(self, trial: Trial, problem: str) -> None:
        super().__init__(f"{trial}: {problem}.")


@dataclass(frozen=True, slots=True)
class Trial:
    """What strikes, where and when."""

    seed: int
    before: Plan
    after: Plan
    fault: Fault
    op_index: int
    phase: Phase
    device: Device | None

    @classmethod
    def drawn(cls, seed: int, job: Job) -> Trial:
        """Draw a trial whose transition does something and parks nothing."""
        chance = random.Random(seed)
        while True:
            before, after = _plan(chance, job), _plan(chance, job)
            graph = compile_transition(_units(before), after, job, prefix="t")
            if graph.ops and not any(isinstance(op, Destroy) and op.park for op in graph.ops):
                break
        device = chance.choice([None, *job.cluster.devices])
        fault, phase = chance.choice(list(Fault)), chance.choice(list(Phase))
        return cls(seed, before, after, fault, chance.randrange(len(graph.ops)), phase, device)

    def __str__(self) -> str:
        where = self.device or "a device of it"
        return (
            f"seed {self.seed}: {self.fault} of {where} in {self.phase} of primitive "
            f"{self.op_index} of [{self.before}] to [{self.after}]"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ended."""

    trial: Trial
    outcome: str
    """``done``, ``rolled back``, ``recovered`` from lost devices, or ``state lost``."""
    cause: str
    """What was raised, if anything."""
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Keeper:
    """How a harness's job is saved and resumed, where it can be."""

    save: Callable[[], None]
    resume: Callable[[], Adapter]
    """Start it again from what was saved, on whatever devices are there."""


def undisturbed(harness: Harness, job: Job) -> list[StepResult]:
    """Return the steps of a run that nothing happens to."""
    one = Placement.packed(Layout(1, 1), job.cluster.healthy[:1])
    harness.launch(job, Plan(dict.fromkeys(job.workload.stages, one)))
    return [harness.step() for _ in range(2)]


def run_trial(
    harness: Harness,
    trial: Trial,
    expected: Sequence[StepResult],
    keeper: Keeper | None = None,
    *,
    transition_s: float = LIMIT_S / 2,
) -> Verdict:
    """Run a trial.

    Args:
        harness: Of the job; each trial launches it anew.
        trial: What strikes.
        expected: Of `undisturbed`.
        keeper: Saves before the transition; asked to resume when state is lost.
        transition_s: Longest that a transition may take, and what a primitive that never returns
            costs.

    Raises:
        TrialFailed: state, losses, units or time are not what they must be.
    """
    start_s = time.perf_counter()
    job = harness.job()
    adapter = harness.launch(job, trial.before)
    _same_step(trial, harness.step(), expected[0])
    if keeper is not None:
        keeper.save()
    state = _state(harness, adapter)
    config = NereusConfig.of({"policy": {"delta": 1000.0}, "timeouts": {"primitive_s": LIMIT_S}})
    controller = Controller(adapter, config, EventLog(None, time.monotonic), _nobody)
    harness.fail_at(trial.fault, trial.op_index, trial.phase, trial.device)
    outcome, cause = _transition(trial, adapter, job, transition_s)
    try:
        _require_state(trial, harness, adapter, state, f"after it was {outcome}")
        if outcome == "lost" or _damaged(adapter, trial, outcome):
            outcome = "recovered"
            controller.at_boundary()
            _require_state(trial, harness, adapter, state, "after the recovery")
        _same_step(trial, _stepped(harness, controller), expected[1])
    except StateLost as lost:
        outcome, cause = "state lost", f"{cause} {lost}"
        _require_none_left(trial, adapter, lost)
        if keeper is not None:
            adapter = keeper.resume()
            _require_state(trial, harness, adapter, state, "after it was resumed")
            _same_step(trial, harness.step(), expected[1])
    elapsed_s = time.perf_counter() - start_s
    if elapsed_s > LIMIT_S:
        raise TrialFailed(trial, f"it took {elapsed_s:.0f} s, a hang")
    return Verdict(trial, outcome, cause, elapsed_s)


def _transition(trial: Trial, adapter: Adapter, job: Job, timeout_s: float) -> tuple[str, str]:
    graph = compile_transition(adapter.units(), trial.after, job, prefix="t")
    with adapter.boundary(job.workload.stages, timeout_s=LIMIT_S):
        try:
            execute(
                graph,
                adapter,
                log=EventLog(None, time.monotonic),
                timeout_s=timeout_s,
                verify=True,
            )
            adapter.relink(trial.after)
        except TransitionFailed as failure:
            return ("rolled back" if failure.rolled_back else "lost"), str(failure.cause)
        except NereusError as error:  # a device went between the last primitive and the relink
            return "lost", str(error)
    return "done", ""


def _stepped(harness: Harness, controller: Controller) -> StepResult:
    """Run a step; a device that turns out to be lost in it is one more thing to recover from."""
    for _ in range(2):
        try:
            return harness.step()
        except UnitLost:
            controller.at_boundary()
    return harness.step()


def _damaged(adapter: Adapter, trial: Trial, outcome: str) -> bool:
    """Whether units are missing although the transition ended well."""
    wanted = _units(trial.after if outcome == "done" else trial.before)
    return _places(adapter.units()) != _places(wanted)


def _places(units: UnitMap) -> list[tuple[ModelStage, Layout, tuple[Device, ...]]]:
    return sorted((u.model_stage, u.layout, u.devices) for u in units.values())


def _units(plan: Plan) -> UnitMap:
    """Return the units that a job starts with."""
    return UnitMap(
        Unit(UnitId(stage, serial), placement.layout, devices)
        for stage, placement in plan.items()
        for serial, devices in enumerate(placement.units)
    )


def _plan(chance: random.Random, job: Job) -> Plan:
    placements = {}
    for stage in job.workload.stages:
        tp, pp, dp = chance.choice(_FORMS)
        devices = tuple(chance.sample(job.cluster.devices, tp * pp * dp))
        placements[stage] = Placement.packed(Layout(tp, pp), devices)
    return Plan(placements)


def _fixed(stage: ModelStage) -> bool:
    """Whether a transition may not change what a stage holds: it trains, or is frozen."""
    return stage.stage is not Stage.GENERATE


def _state(harness: Harness, adapter: Adapter) -> dict[ModelStage, str]:
    """Return a SHA-256 of the state of every stage whose units are all alike."""
    units = adapter.units()
    stages = [s for s in units.stages() if _fixed(s)]
    return {stage: _sha256(harness, units.of(stage)[0].id) for stage in stages}


def _sha256(harness: Harness, unit: UnitId) -> str:
    found = hashlib.sha256()
    state = harness.peek(unit)
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].tobytes())
    return found.hexdigest()


def _require_state(
    trial: Trial, harness: Harness, adapter: Adapter, state: dict[ModelStage, str], when: str
) -> None:
    for unit in adapter.units():
        if _fixed(unit.model_stage) and _sha256(harness, unit) != state[unit.model_stage]:
            raise TrialFailed(trial, f"{unit} holds other state {when}")


def _require_none_left(trial: Trial, adapter: Adapter, lost: StateLost) -> None:
    stage = str(lost.stage)
    if left := [u for u in adapter.units() if str(u.model_stage) == stage]:
        raise TrialFailed(trial, f"{lost} But {left[0]} is intact")


def _same_step(trial: Trial, found: StepResult, expected: StepResult) -> None:
    if (found.step, found.sample_ids) != (expected.step, expected.sample_ids):
        raise TrialFailed(
            trial, f"step {found.step} of {found.sample_ids}, expected {expected.step} of "
            f"{expected.sample_ids}",
        )  # fmt: skip
    for model, loss in expected.losses.items():
        if abs(found.losses[model] - loss) > TOLERANCE * max(1.0, abs(loss)):
            raise TrialFailed(
                trial, f"step {found.step}: loss of {model} {found.losses[model]!r}, not {loss!r}"
            )


def _nobody(hook: str, **kwargs: object) -> None:
    """Tell no plugin."""
