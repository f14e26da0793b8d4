"""Devices that fail."""

from __future__ import annotations

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import require, same_state, same_units
from nereus_conformance.subject import Subject
from nereus_conformance.ties import require_apart
from nereus_core.capabilities import Feature
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, UnitLost
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.primitives import Kind
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Stage

ONE, TP2 = Layout(1, 1), Layout(2, 1)


@pytest.mark.needs(Feature.UNIT_LOSS)
def test_lost_device_is_reported_with_the_units_it_took(arrange: Arranger) -> None:
    """A failed device is unhealthy in job() and observe(); its units are gone and named.

    If this fails, check who watches the workers, and that UnitLost carries lost and intact units.
    """
    subject = arrange(Stage.TRAIN, num_units=2)
    subject.step()
    before = subject.units
    lost = subject.own()[1]
    device = lost.devices[0]
    subject.harness.fail(device)
    assert device in subject.adapter.job().cluster.failed
    assert device not in subject.adapter.observe().healthy
    same_units(before.intact([device]), subject.units, f"the loss of {device}")
    with pytest.raises(UnitLost) as info:
        subject.step()
    assert lost.id in info.value.lost, str(info.value)
    assert subject.own()[0].id in info.value.intact, str(info.value)


@pytest.mark.needs(Feature.UNIT_LOSS)
def test_intact_units_keep_their_state(arrange: Arranger) -> None:
    """What did not lie on the lost device is unharmed.

    If this fails, check what a surviving unit does when a peer of its group is gone.
    """
    subject = arrange(Stage.TRAIN, num_units=2)
    subject.step()
    kept, lost = subject.own()
    before = subject.state(kept)
    subject.harness.fail(lost.devices[0])
    same_state(before, subject.state(kept), f"the loss of {lost.id}")


@pytest.mark.needs(Feature.UNIT_LOSS, Kind.EXTEND)
def test_extend_from_an_intact_unit_replaces_a_lost_one(arrange: Arranger) -> None:
    """I12: after a loss, a boundary opens, an intact unit is the source, and the job steps on.

    If this fails, check that boundary and groups do not wait for the lost device.
    """
    job = arrange.job()
    subject = arrange(Stage.TRAIN, num_units=2, job=job)
    subject.step()
    kept, lost = subject.own()
    before = subject.state(kept)
    subject.harness.fail(lost.devices[0])
    spare = _spare_for_train(subject)
    op = subject.extend([spare], ONE, sources=[kept.id])
    with subject.boundary():
        for done in subject.completed(op):
            subject.perform(done)
        same_state(before, subject.state(op.unit), str(op))
        subject.adapter.relink(Plan.of_units(subject.units))
    result = subject.step()
    require(
        len(set(result.sample_ids)) == job.global_batch,
        "I12 resume",
        f"the step after {op} trained on {len(set(result.sample_ids))} prompts",
    )
    require(result.step == 1, "I12 resume", f"the step after the loss is {result.step}, not 1")


def _spare_for_train(subject: Subject) -> Device:
    """Return a healthy device that holds no unit of training."""
    held = {d for unit in subject.units.of(ACTOR_TRAIN) for d in unit.devices}
    return next(d for d in subject.adapter.job().cluster.healthy if d not in held)


@pytest.mark.needs(Feature.UNIT_LOSS, Kind.SPLIT)
def test_failed_primitive_leaves_a_true_unit_map(arrange: Arranger) -> None:
    """I4: a primitive that meets a dead device raises, and units() tells what is left.

    If this fails, check that units() leaves out lost units and keeps all others.
    """
    subject = arrange(Stage.TRAIN, TP2)
    before, parent = subject.units, subject.own()[0]
    op = subject.split(parent, ONE)
    with subject.boundary():
        subject.harness.fail(parent.devices[1])
        try:
            subject.perform(op)
        except UnitLost as error:
            require(parent.id in error.lost, "I4 strong", f"{error} does not name {parent.id}")
        except NereusError as error:
            pytest.fail(f"I4 strong: {op} raised {type(error).__name__}, not UnitLost: {error}")
        else:
            pytest.fail(f"I4 strong: {op} was done without {parent.devices[1]}")
        same_units(before.intact([parent.devices[1]]), subject.units, f"the failed {op}")


@pytest.mark.needs(Feature.UNIT_LOSS, Kind.SPLIT)
def test_a_loss_elsewhere_does_not_fail_a_primitive(arrange: Arranger) -> None:
    """I6: a primitive whose devices are all healthy is done, whatever was lost on others.

    If this fails, check that a loss is looked for among the devices that take part.
    """
    subject = arrange(Stage.TRAIN, TP2)
    before, parent = subject.state(subject.own()[0]), subject.own()[0]
    require_apart(subject.job, ACTOR_TRAIN, ACTOR_GENERATE)
    elsewhere = subject.units.of(ACTOR_GENERATE)[0].devices[0]
    op = subject.split(parent, ONE)
    with subject.boundary():
        subject.harness.fail(elsewhere)
        subject.perform(op)
        for child in op.into:
            same_state(before, subject.state(child), str(op))
