"""Extend: a new unit on newly acquired devices, its state copied from intact units."""

from __future__ import annotations

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import nothing_left, refused, require, same_state, same_units
from nereus_conformance.ties import require_apart
from nereus_core.capabilities import Feature
from nereus_core.errors import DevicesBusy, PrimitiveError
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.primitives import Extend, Kind, apply
from nereus_core.units import Unit
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Stage

ONE, TP2 = Layout(1, 1), Layout(2, 1)


@pytest.mark.needs(Kind.EXTEND)
def test_extend_adds_one_unit(arrange: Arranger, stage: Stage) -> None:
    """The stage has one unit more, on the devices named; all others are as before.

    If this fails, check that the new unit is registered under the id of the primitive.
    """
    subject = arrange(stage, spare=1)
    before = subject.units
    op = subject.extend(subject.spare)
    with subject.boundary():
        subject.perform(op)
        same_units(apply(op, before), subject.units, str(op))


@pytest.mark.needs(Kind.EXTEND)
def test_extend_copies_parameters(arrange: Arranger, stage: Stage) -> None:
    """I2: the new unit holds its source's parameters, bit for bit.

    If this fails, check that a new unit is filled from the source and not from a checkpoint.
    """
    subject = arrange(stage, spare=1)
    subject.step()
    before = subject.state(subject.own()[0])
    op = subject.extend(subject.spare)
    with subject.boundary():
        subject.perform(op)
        same_state(before, subject.state(op.unit), str(op), slots=("param",))


@pytest.mark.needs(Kind.EXTEND, Feature.OPTIMIZER_STATE)
def test_extend_copies_optimizer_state(arrange: Arranger) -> None:
    """I2: the new unit holds both Adam moments of its source, bit for bit.

    If this fails, check that moments take the routes of their parameter.
    """
    subject = arrange(Stage.TRAIN, spare=1)
    subject.step()
    before = subject.state(subject.own()[0])
    op = subject.extend(subject.spare)
    with subject.boundary():
        subject.perform(op)
        same_state(before, subject.state(op.unit), str(op), slots=("exp_avg", "exp_avg_sq"))


@pytest.mark.needs(Kind.EXTEND)
def test_extend_leaves_the_source_untouched(arrange: Arranger, stage: Stage) -> None:
    """The source keeps its devices and its state, and holds no more than before; nor once linked.

    If this fails, check that the source sends a copy, and frees what it made to send.
    """
    subject = arrange(stage, spare=1)
    source, memory = subject.own()[0], subject.memory()
    before = subject.state(source)
    op, *tied = subject.completed(subject.extend(subject.spare))
    with subject.boundary():
        subject.perform(op)
        require(subject.units[source.id] == source, "I1 devices", f"{op} changed {source}")
        same_state(before, subject.state(source), f"{op}, on its source,")
        nothing_left(memory, subject.memory(), f"{op}", source.devices)
        for other in tied:
            subject.perform(other)
        subject.adapter.relink(Plan.of_units(subject.units))
        same_state(before, subject.state(source), f"relink after {op}, on its source,")
        linked = subject.memory()
        nothing_left(memory, linked, f"relink after {op}", source.devices)
        for device in source.devices:
            require(linked[device] > 0, "I7 released", f"{source} holds 0 bytes on {device}")


@pytest.mark.needs(Kind.EXTEND)
def test_extend_onto_held_devices_is_refused(arrange: Arranger) -> None:
    """Devices that belong to another unit of the stage are not taken.

    If this fails, check that holders are looked up among units alive.
    """
    subject = arrange(Stage.TRAIN, num_units=2)
    op = subject.extend(subject.own()[1].devices)
    with subject.boundary(), refused(subject, DevicesBusy, str(op)):
        subject.perform(op)


@pytest.mark.needs(Kind.EXTEND)
def test_extended_unit_takes_part_in_the_next_step(arrange: Arranger, stage: Stage) -> None:
    """After relink the new unit has its share of the batch, and stays identical to its source.

    If this fails, check that relink adds the unit to the data-parallel group and to routing.
    """
    subject = arrange(stage, spare=1)
    subject.step()
    op = subject.extend(subject.spare)
    subject.transition(op)
    result = subject.step()
    if stage is Stage.GENERATE:
        require(
            op.unit.id in result.weight_version,
            "I10 semantics",
            f"{op.unit.id} served nothing: {sorted(map(str, result.weight_version))} did",
        )
    source = subject.own()[0]
    same_state(subject.state(source), subject.state(op.unit), f"the step after {op}")


@pytest.mark.needs(Kind.EXTEND, stage=Stage.GENERATE)
def test_extended_rollout_serves_the_source_version(arrange: Arranger) -> None:
    """I11: a new generating unit serves the newest weights, as all its siblings do.

    If this fails, check that the weight version is copied with the weights.
    """
    subject = arrange(Stage.GENERATE, spare=1)
    older = subject.step().weight_version
    train = subject.units.of(ACTOR_TRAIN)[0]
    # The state of the generating unit is that of the train stage: weights follow it.
    op = subject.extend(subject.spare, ONE, sources=[train.id])
    subject.transition(op)
    served = subject.step().weight_version
    require(
        len(set(served.values())) == 1 and op.unit.id in served,
        "I11 version",
        f"units serve { ({str(u): v for u, v in served.items()}) }",
    )
    require(
        min(served.values()) > max(older.values()),
        "I11 version",
        f"version {served[op.unit.id]} after a training step, {max(older.values())} before it",
    )
    with subject.boundary():
        newest = subject.state(subject.units.of(ACTOR_TRAIN)[0])
        mine = subject.state(op.unit)
        wanted = {k: v for k, v in newest.items() if k.startswith("param/")}
        stale = [k for k, v in wanted.items() if mine[k].tobytes() != v.tobytes()]
        require(not stale, "I11 version", f"{op.unit.id} has other weights than training: {stale}")


@pytest.mark.needs(Kind.EXTEND, Feature.COLOCATED_STAGES, stage=Stage.GENERATE)
def test_extend_picks_the_nearest_source(arrange: Arranger) -> None:
    """A part that already lies on the device is copied there: nothing crosses a link.

    If this fails, check that routes start from all units that the primitive names.
    """
    subject = arrange(Stage.GENERATE, spare=1)
    require_apart(subject.job, ACTOR_GENERATE, ACTOR_TRAIN)
    train = subject.units.of(ACTOR_TRAIN)[0]
    op = subject.extend(
        train.devices, ONE, sources=[subject.own()[0].id, train.id], stage=ACTOR_GENERATE
    )
    with subject.boundary():
        receipt = subject.perform(op)
    assert receipt.moved_bytes == 0, f"{op} moved {receipt.moved_bytes} bytes"
    assert receipt.kept_bytes > 0


@pytest.mark.needs(Kind.EXTEND, stage=Stage.INFER)
def test_extend_from_the_origin_loads_what_never_changes(arrange: Arranger) -> None:
    """Without sources, a unit of a frozen stage gets the weights that the stage started with.

    If this fails, check that the unit is loaded from where the model first came from, and that
    its counters are those of a unit that never changed.
    """
    if not arrange.job().workload.node(REF_INFER).origin:
        pytest.skip("the reference of this job has no origin: it is copied from a unit alone")
    subject = arrange(Stage.INFER, spare=1)
    subject.step()
    before = subject.state(subject.own()[0])
    unit = Unit(subject.fresh(1)[0], ONE, tuple(subject.spare))
    op = Extend(subject.op_id(), (), unit)
    with subject.boundary():
        receipt = subject.perform(op)
        same_state(before, subject.state(unit), str(op))
    require(receipt.kept_bytes == 0, "receipt", f"{op} kept {receipt.kept_bytes} bytes")


@pytest.mark.needs(Kind.EXTEND)
def test_extend_of_a_training_stage_has_no_origin(arrange: Arranger) -> None:
    """State that changes cannot come from a checkpoint of the start: refused.

    If this fails, check that the primitive is held against `workload.Node.origin`.
    """
    subject = arrange(Stage.TRAIN, spare=1)
    op = Extend(subject.op_id(), (), Unit(subject.fresh(1)[0], ONE, tuple(subject.spare)))
    with subject.boundary(), refused(subject, PrimitiveError, str(op)):
        subject.perform(op)
