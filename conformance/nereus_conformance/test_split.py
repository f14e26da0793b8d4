"""Split: one unit becomes units of a smaller layout on its own devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import partitioned, refused, require, same_state, same_units
from nereus_conformance.suite import Suite
from nereus_conformance.ties import tied
from nereus_core.capabilities import Feature
from nereus_core.errors import Infeasible
from nereus_core.layout import Layout, stage_problems
from nereus_core.primitives import Kind, Split, apply
from nereus_core.state import unit_shards
from nereus_core.units import Unit
from nereus_core.workload import ACTOR_TRAIN, Stage

ONE, TP2, PP2, PP3 = Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(1, 3)
SHAPES = [(TP2, ONE), (PP2, ONE), (TP2, PP2)]
"""Both degrees undone, and a re-layout: a split with one child."""


@pytest.mark.needs(Kind.SPLIT)
def test_split_uses_exactly_the_parent_devices(arrange: Arranger, stage: Stage) -> None:
    """I1: the children hold the parent's devices, each one once, and no other.

    If this fails, check the order in which devices are given to children.
    """
    subject = arrange(stage, TP2)
    before, parent = subject.units, subject.own()[0]
    op = subject.split(parent, ONE)
    with subject.boundary():
        subject.perform(op)
        held = sorted(d for unit in subject.own() for d in unit.devices)
        require(held == sorted(parent.devices), "I1 devices", f"after {op} units hold {held}")
        same_units(apply(op, before), subject.units, str(op))
        partitioned(subject.units, subject)


@pytest.mark.needs(Kind.SPLIT)
def test_split_children_have_the_requested_layout(arrange: Arranger, stage: Stage) -> None:
    """The children have the ids, the layout and the devices that the primitive names.

    If this fails, check that layout is read from the new group and not from the parent.
    """
    subject = arrange(stage, TP2)
    op = subject.split(subject.own()[0], PP2)
    with subject.boundary():
        subject.perform(op)
        assert subject.own() == op.into


@pytest.mark.needs(Kind.SPLIT)
@pytest.mark.parametrize(("old", "new"), SHAPES, ids=lambda shape: str(shape))
def test_split_keeps_parameters(arrange: Arranger, stage: Stage, old: Layout, new: Layout) -> None:
    """I2: every child holds the parent's parameters, bit for bit.

    If this fails, check that shards are cut by tp rank inside the unit and layers by pp rank.
    """
    subject = arrange(stage, old)
    before = subject.state(subject.own()[0])
    op = subject.split(subject.own()[0], new)
    with subject.boundary():
        subject.perform(op)
        for child in op.into:
            same_state(before, subject.state(child), str(op), slots=("param",))


@pytest.mark.needs(Kind.SPLIT, Feature.OPTIMIZER_STATE)
def test_split_keeps_optimizer_state(arrange: Arranger) -> None:
    """I2: every child holds both Adam moments of the parent, bit for bit.

    If this fails, check that moments take the routes of their parameter.
    """
    subject = arrange(Stage.TRAIN, TP2)
    subject.step()
    before = subject.state(subject.own()[0])
    op = subject.split(subject.own()[0], ONE)
    with subject.boundary():
        subject.perform(op)
        for child in op.into:
            same_state(before, subject.state(child), str(op), slots=("exp_avg", "exp_avg_sq"))


@pytest.mark.needs(Kind.SPLIT, Feature.RNG_STATE)
def test_split_keeps_rng_and_step_count(suite: Suite, arrange: Arranger) -> None:
    """I2: counters go to every child, and the next step is the one the fixed layout takes.

    If this fails, check that step counts (Adam's bias correction, the schedule) and random state
    are handed to the children.
    """
    fixed = arrange.fixed(3)
    subject = arrange(Stage.TRAIN, TP2)
    subject.step()
    counters = None
    if suite.holds(Feature.FINGERPRINT):
        counters = subject.adapter.fingerprint(subject.own()[0].id).steps
    op = subject.split(subject.own()[0], ONE)
    subject.transition(op)
    if counters is not None:
        for child in op.into:
            steps = subject.adapter.fingerprint(child.id).steps
            require(
                steps == counters, "I2 state", f"{op} left counters {steps}, they were {counters}"
            )
    following = [subject.step(), subject.step()]
    for wanted, found in zip(fixed[1:], following, strict=True):
        require(
            found.losses == pytest.approx(wanted.losses, rel=1e-4),
            "I2 state",
            f"after {op} step {found.step} has losses {found.losses}, not {wanted.losses}",
        )


@pytest.mark.needs(Kind.SPLIT, Feature.COLOCATED_STAGES)
def test_split_into_indivisible_layout_is_infeasible(arrange: Arranger) -> None:
    """A layout that the model's shapes do not allow is refused before anything is built.

    If this fails, check that stage_problems() is asked before groups are formed.
    """
    bad = Layout(3, 1)
    subject = arrange(Stage.TRAIN, PP3)
    if not stage_problems(subject.job, ACTOR_TRAIN, bad):
        pytest.skip("the job's train stage may have tp=3")
    op = subject.split(subject.own()[0], bad)
    with subject.boundary(), refused(subject, Infeasible, str(op)):
        subject.perform(op)
    subject.step()


@pytest.mark.needs(Kind.SPLIT)
def test_split_that_exceeds_memory_is_infeasible_before_it_starts(arrange: Arranger) -> None:
    """Children that do not fit on a device are refused, and nothing was moved or freed.

    If this fails, check that the need of all children is compared with the device's memory before
    the first byte moves.
    """
    job = arrange.job()
    shard = unit_shards(job.model(ACTOR_TRAIN), ONE)[0]
    whole = job.precision.train_bytes * sum(box.num_elements for box in shard.values())
    # Stages that are tied lie on the same devices, whole.
    beside = sum(
        job.precision.kept_bytes(other.stage)
        * sum(box.num_elements for box in unit_shards(job.model(other), ONE)[0].values())
        for other in tied(job, ACTOR_TRAIN)
    )
    # Nine tenths of one child: the parent's half fits, a child does not even alone.
    spec = replace(job.cluster.device_spec, memory_bytes=whole * 9 // 10 + beside)
    job = replace(job, cluster=replace(job.cluster, device_spec=spec))
    subject = arrange(Stage.TRAIN, TP2, job=job)
    op = subject.split(subject.own()[0], ONE)
    with subject.boundary(), refused(subject, Infeasible, str(op)):
        subject.perform(op)


@pytest.mark.needs(Kind.SPLIT)
def test_refused_split_leaves_units_untouched(arrange: Arranger) -> None:
    """I4: a split that leaves its parent's devices is refused; the job steps as if never asked.

    If this fails, check that preconditions (`primitives.check`) come first.
    """
    subject = arrange(Stage.TRAIN, ONE, spare=1)
    parent = subject.own()[0]
    child = Unit(subject.fresh(1)[0], ONE, subject.spare)
    op = Split(subject.op_id(), parent.id, (child,))
    with subject.boundary(), refused(subject, Infeasible, str(op)):
        subject.perform(op)
    require(subject.step().step == 0, "I12 resume", "the next step was not taken")
