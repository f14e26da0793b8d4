"""Merge: identical units become one of a larger layout."""

from __future__ import annotations

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import (
    nothing_left,
    partitioned,
    refused,
    require,
    same_state,
    same_units,
)
from nereus_conformance.ties import require_apart
from nereus_core.capabilities import Feature
from nereus_core.errors import Diverged, PrimitiveError
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.primitives import Kind, Merge, apply
from nereus_core.units import Unit
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Stage

ONE, TP2, PP2 = Layout(1, 1), Layout(2, 1), Layout(1, 2)


@pytest.mark.needs(Kind.MERGE)
def test_merge_uses_the_union_of_devices(arrange: Arranger, stage: Stage) -> None:
    """I1: the merged unit holds all devices of its parents, and the parents are gone.

    If this fails, check the order of devices in the merged unit.
    """
    subject = arrange(stage, ONE, 2)
    before, parents = subject.units, subject.own()
    op = subject.merge(parents, TP2)
    with subject.boundary():
        subject.perform(op)
        held = sorted(d for unit in subject.own() for d in unit.devices)
        wanted = sorted(d for unit in parents for d in unit.devices)
        require(held == wanted, "I1 devices", f"after {op} units hold {held}")
        same_units(apply(op, before), subject.units, str(op))
        partitioned(subject.units, subject)


@pytest.mark.needs(Kind.MERGE)
@pytest.mark.parametrize("new", [TP2, PP2], ids=str)
def test_merge_keeps_parameters(arrange: Arranger, stage: Stage, new: Layout) -> None:
    """I2: the merged unit holds its parents' parameters, bit for bit.

    If this fails, check that shards are cut by tp rank inside the unit and layers by pp rank.
    """
    subject = arrange(stage, ONE, 2)
    before = subject.state(subject.own()[0])
    op = subject.merge(subject.own(), new)
    with subject.boundary():
        subject.perform(op)
        same_state(before, subject.state(op.into), str(op), slots=("param",))


@pytest.mark.needs(Kind.MERGE, Feature.OPTIMIZER_STATE)
def test_merge_keeps_optimizer_state(arrange: Arranger) -> None:
    """I2: the merged unit holds both Adam moments of its parents, bit for bit.

    If this fails, check that moments take the routes of their parameter.
    """
    subject = arrange(Stage.TRAIN, ONE, 2)
    subject.step()
    before = subject.state(subject.own()[0])
    op = subject.merge(subject.own(), TP2)
    with subject.boundary():
        subject.perform(op)
        same_state(before, subject.state(op.into), str(op), slots=("exp_avg", "exp_avg_sq"))


@pytest.mark.needs(Kind.MERGE)
def test_merge_of_diverged_units_is_refused(arrange: Arranger) -> None:
    """Units that differ in one tensor do not merge, and both live on.

    If this fails, check that digests of all parents are compared before shards are adopted.
    """
    subject = arrange(Stage.TRAIN, ONE, 2)
    subject.step()
    name = next(key for key in subject.state(subject.own()[0]) if key.startswith("exp_avg/"))
    subject.harness.disturb(subject.own()[1].id, name)
    op = subject.merge(subject.own(), TP2)
    with subject.boundary(), refused(subject, Diverged, f"{op} of units that differ in {name}"):
        subject.perform(op)


@pytest.mark.needs(Kind.MERGE)
def test_merge_across_model_stages_is_refused(arrange: Arranger) -> None:
    """Units of two model-stages do not merge.

    If this fails, check that preconditions (`primitives.check`) come first.
    """
    subject = arrange(Stage.TRAIN)
    require_apart(subject.job, ACTOR_TRAIN, ACTOR_GENERATE)
    train, generate = subject.own()[0], subject.units.of(ACTOR_GENERATE)[0]
    into = Unit(subject.fresh(1)[0], TP2, (*train.devices, *generate.devices))
    op = Merge(subject.op_id(), (train.id, generate.id), into)
    with subject.boundary(), refused(subject, PrimitiveError, str(op)):
        subject.perform(op)


@pytest.mark.needs(Kind.MERGE, Kind.SPLIT)
def test_merge_undoes_split(arrange: Arranger, stage: Stage) -> None:
    """A split and the merge of its children leave state and devices as they were; linked, memory.

    If this fails, check what stays behind on a device after each.
    """
    subject = arrange(stage, TP2)
    parent, memory = subject.own()[0], subject.memory()
    before = subject.state(parent)
    with subject.boundary():
        split = subject.split(parent, ONE)
        subject.perform(split)
        merge = subject.merge(split.into, TP2)
        subject.perform(merge)
        same_state(before, subject.state(merge.into), f"{split}, {merge}")
        assert subject.own()[0].devices == parent.devices
        nothing_left(memory, subject.memory(), f"{split}, {merge}", memory)
        subject.adapter.relink(Plan.of_units(subject.units))
        require(subject.memory() == memory, "I7 released", f"{subject.memory()}, was {memory}")


@pytest.mark.needs(Kind.MERGE, Kind.SPLIT)
def test_split_undoes_merge(arrange: Arranger, stage: Stage) -> None:
    """A merge and the split of its result leave state and devices as they were; linked, memory.

    If this fails, check what stays behind on a device after each.
    """
    subject = arrange(stage, ONE, 2)
    parents, memory = subject.own(), subject.memory()
    before = subject.state(parents[0])
    with subject.boundary():
        merge = subject.merge(parents, PP2)
        subject.perform(merge)
        split = subject.split(merge.into, ONE)
        subject.perform(split)
        for child in split.into:
            same_state(before, subject.state(child), f"{merge}, {split}")
        assert [u.devices for u in subject.own()] == [u.devices for u in parents]
        nothing_left(memory, subject.memory(), f"{merge}, {split}", memory)
        subject.adapter.relink(Plan.of_units(subject.units))
        require(subject.memory() == memory, "I7 released", f"{subject.memory()}, was {memory}")
