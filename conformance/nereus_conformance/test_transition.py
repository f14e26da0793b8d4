"""Whole transitions: the core's graph and execution over the adapter."""

from __future__ import annotations

import pytest

from nereus_conformance.arrange import MODEL_STAGES, Arranger
from nereus_conformance.assertions import partitioned, require, same_state, uniform
from nereus_conformance.subject import THREAD_S, Subject
from nereus_conformance.suite import Suite
from nereus_conformance.ties import require_kept
from nereus_core.capabilities import Feature
from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.events import EventLog
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Kind
from nereus_core.transition import compile_transition, execute
from nereus_core.workload import Algorithm, ModelStage, Stage

ONE, TP2 = Layout(1, 1), Layout(2, 1)


def _target(suite: Suite, subject: Subject) -> Plan:
    """Return a plan in which each stage differs as far as the adapter can change it."""

    def placement(stage: ModelStage) -> Placement:
        def can(*kinds: Kind) -> bool:
            return all(suite.holds((kind, stage.stage)) for kind in kinds)

        now = subject.plan[stage]
        if can(Kind.SPLIT):
            return Placement.packed(ONE, tuple(d for unit in now.units for d in unit))
        if can(Kind.EXTEND, Kind.DESTROY):
            return Placement(now.layout, tuple(reversed(now.units))[:1])
        return now

    return Plan({stage: placement(stage) for stage in subject.plan})


def _go(subject: Subject, target: Plan, name: str) -> None:
    graph = compile_transition(subject.units, target, subject.job, prefix=name)
    with subject.boundary():
        execute(graph, subject.adapter, log=EventLog(None, lambda: 0.0), timeout_s=THREAD_S)
        subject.adapter.relink(target)


def _changed(suite: Suite, subject: Subject) -> Plan:
    target = _target(suite, subject)
    if target == subject.plan:
        pytest.skip("the adapter has no primitive that changes a plan")
    require_kept(subject.job, target)
    return target


@pytest.mark.needs(Feature.COLOCATED_STAGES)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_planned_transition_reaches_the_plan(
    suite: Suite, arrange: Arranger, algorithm: Algorithm
) -> None:
    """I1, I3: after the compiled graph has run, the units are those of the plan; the job steps.

    If this fails, check the events of the transition: which primitive came last, and what it left.
    """
    subject = arrange.everywhere(Stage.TRAIN, TP2, algorithm=algorithm)
    subject.step()
    target = _changed(suite, subject)
    _go(subject, target, "there")
    require(
        Plan.of_units(subject.units) == target,
        "I3 uniform",
        f"units are {subject.units!r}, not those of {target}",
    )
    partitioned(subject.units, subject)
    uniform(subject.units)
    require(subject.step().step == 1, "I12 resume", "the next step was not taken")


@pytest.mark.needs(Feature.COLOCATED_STAGES, Feature.OPTIMIZER_STATE)
@pytest.mark.needs(Kind.MERGE, Kind.SPLIT)
def test_there_and_back_restores_state(suite: Suite, arrange: Arranger) -> None:
    """I2: a transition and the one back leave every byte of state as it was.

    If this fails, check which of the two changes it: run the cases of split and merge.
    """
    subject = arrange.everywhere(Stage.TRAIN, TP2)
    subject.step()
    stages = [s for s in MODEL_STAGES.values() if suite.holds((Kind.MERGE, s.stage))]
    before = {stage: subject.state(subject.units.of(stage)[0]) for stage in stages}
    target = _changed(suite, subject)
    there = Plan({s: target[s] if s in stages else subject.plan[s] for s in target})
    _go(subject, there, "there")
    _go(subject, subject.plan, "back")
    require(
        Plan.of_units(subject.units) == subject.plan, "I3 uniform", f"units are {subject.units!r}"
    )
    for stage, state in before.items():
        for unit in subject.units.of(stage):
            same_state(state, subject.state(unit), f"there and back, on {unit},")


def test_rejected_transition_touches_nothing(arrange: Arranger) -> None:
    """A controller that only advises leaves units, memory and state as they are.

    If this fails, check what reading a job changes in it.
    """
    subject = arrange()
    advise = NereusConfig.of({"mode": "advise", "policy": {"cooldown_steps": 0}})
    controller = Controller(
        subject.adapter, advise, EventLog(None, lambda: 0.0), lambda hook, **values: None
    )
    for _ in range(2):
        subject.step()
        units, memory = subject.units, subject.memory()
        states = {unit: subject.state(unit) for unit in units}
        controller.at_boundary()
        require(subject.units == units, "I4 strong", f"units are {subject.units!r}, were {units!r}")
        require(subject.memory() == memory, "I4 strong", f"memory is {subject.memory()}")
        for unit, state in states.items():
            same_state(state, subject.state(unit), "advice")
