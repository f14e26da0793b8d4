"""Receipts: what a primitive says it did."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import require, same_units
from nereus_conformance.subject import Subject
from nereus_conformance.suite import Suite
from nereus_core.layout import Layout
from nereus_core.primitives import Kind, Primitive, acquired, created, ended, released
from nereus_core.state import needed_elements, placed
from nereus_core.workload import ACTOR_TRAIN, Stage

ONE, TP2 = Layout(1, 1), Layout(2, 1)
_BUILDERS: dict[Kind, tuple[Layout, int, Callable[[Subject], Primitive]]] = {
    Kind.SPLIT: (TP2, 1, lambda s: s.split(s.own()[0], ONE)),
    Kind.EXTEND: (ONE, 1, lambda s: s.extend(s.spare)),
    Kind.DESTROY: (ONE, 2, lambda s: s.destroy(s.own()[1])),
    Kind.MERGE: (ONE, 2, lambda s: s.merge(s.own(), TP2)),
}


def arranged(suite: Suite, arrange: Arranger, stage: Stage) -> tuple[Subject, Primitive]:
    """Launch a job and build the first primitive that the adapter can do on a stage."""
    for kind, (layout, units, build) in _BUILDERS.items():
        if suite.holds((kind, stage)):
            subject = arrange(stage, layout, units, spare=2 - layout.num_devices * units)
            return subject, build(subject)
    pytest.skip(f"the adapter has no primitive on {stage}")


def test_replayed_op_returns_its_receipt(suite: Suite, arrange: Arranger, stage: Stage) -> None:
    """I5: the same op_id again returns the same receipt and does nothing.

    If this fails, check that receipts are kept by op_id and looked up first.
    """
    subject, op = arranged(suite, arrange, stage)
    with subject.boundary():
        receipt = subject.perform(op)
        units, memory = subject.units, subject.memory()
        try:
            again = subject.perform(op)
        except Exception as error:
            pytest.fail(f"I5 once: {op} again raised {type(error).__name__}: {error}")
        require(again == receipt, "I5 once", f"{op} again gave {again}, not {receipt}")
        same_units(units, subject.units, f"{op} again")
        require(subject.memory() == memory, "I5 once", f"{op} again changed memory")


def test_receipt_lists_created_ended_acquired_released(suite: Suite, arrange: Arranger) -> None:
    """A receipt names the units and devices that the primitive's definition names.

    If this fails, check that the sets are those of `primitives.acquired` and `released`.
    """
    subject, op = arranged(suite, arrange, Stage.TRAIN)
    before = subject.units
    with subject.boundary():
        receipt = subject.perform(op)
    assert receipt.op_id == op.op_id
    assert receipt.created == created(op)
    assert receipt.ended == ended(op)
    assert receipt.acquired == acquired(op, before)
    assert receipt.released == released(op, before)


@pytest.mark.needs(Kind.EXTEND)
@pytest.mark.parametrize("layout", [ONE, TP2], ids=str)
def test_moved_bytes_equal_the_planned_routes(arrange: Arranger, layout: Layout) -> None:
    """What crossed between devices is exactly what they needed and did not hold.

    If this fails, check that each part is sent once, and that parts kept in place are not counted.
    """
    n = layout.num_devices
    subject = arrange(Stage.TRAIN, layout, spare=n)
    subject.step()  # some optimizers have no moments before
    source = subject.own()[0]
    op = subject.extend(subject.spare[:n], layout)
    model, train_bytes = subject.job.model(ACTOR_TRAIN), subject.job.precision.train_bytes
    needed = needed_elements(
        placed(model, source.layout, source.devices), placed(model, layout, op.unit.devices)
    )
    with subject.boundary():
        receipt = subject.perform(op)
    assert receipt.moved_bytes == needed * train_bytes, (
        f"{op} moved {receipt.moved_bytes} bytes; the least is {needed * train_bytes}"
    )


def test_elapsed_is_wall_seconds(suite: Suite, arrange: Arranger) -> None:
    """A receipt's seconds are those of the call.

    If this fails, check the clock and its unit.
    """
    subject, op = arranged(suite, arrange, Stage.TRAIN)
    with subject.boundary():
        start_s = time.perf_counter()
        receipt = subject.perform(op)
        wall_s = time.perf_counter() - start_s
    assert 0 < receipt.elapsed_s <= wall_s
