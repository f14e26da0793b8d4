"""Phases of a primitive, and what an error as one begins leaves."""

from __future__ import annotations

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import refused, require, same_state, same_units
from nereus_conformance.subject import Subject
from nereus_conformance.suite import Suite
from nereus_conformance.test_receipts import arranged
from nereus_core.capabilities import Feature
from nereus_core.errors import NereusError
from nereus_core.harness import Fault
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Plan
from nereus_core.primitives import Kind, Primitive, apply
from nereus_core.units import UnitMap
from nereus_core.workload import Stage

ONE, TP2 = Layout(1, 1), Layout(2, 1)
MAY_ABORT = [phase for phase in Phase if phase.may_abort]


class Interrupted(NereusError):
    """What a case raises as a phase begins."""


def _raise_at(subject: Subject, at: Phase) -> None:
    def hook(op: Primitive, phase: Phase) -> None:
        if phase is at:
            raise Interrupted(f"{phase} of {op}")

    subject.adapter.watch(hook)


def test_phases_are_told_in_order(suite: Suite, arrange: Arranger, stage: Stage) -> None:
    """I13: whoever watches hears of all five phases, in order, and of no other primitive's.

    If this fails, check that the code that performs a primitive says `enter` for each phase.
    """
    subject, op = arranged(suite, arrange, stage)
    heard: list[tuple[Primitive, Phase]] = []
    with subject.boundary():
        subject.adapter.watch(lambda *what: heard.append(what))
        subject.perform(op)
        subject.adapter.watch(None)
    require(
        heard == [(op, phase) for phase in Phase],
        "I13 phases",
        f"{op} told of {[str(phase) for _, phase in heard]}, but should of {list(map(str, Phase))}",
    )


def test_units_change_between_commit_and_release(
    suite: Suite, arrange: Arranger, stage: Stage
) -> None:
    """I13: as commit begins units() is as before; as release begins it is as it will be.

    If this fails, check what is switched before `enter(Phase.COMMIT)`.
    """
    subject, op = arranged(suite, arrange, stage)
    before, seen = subject.units, dict[Phase, UnitMap]()
    with subject.boundary():
        subject.adapter.watch(lambda op, phase: seen.update({phase: subject.units}))
        subject.perform(op)
        subject.adapter.watch(None)
    require(set(seen) == set(Phase), "I13 phases", f"{op} told of {', '.join(seen) or 'none'}")
    for phase, units in seen.items():
        wanted = before if phase.may_abort else apply(op, before)
        same_units(wanted, units, f"{phase} of {op} had begun")


@pytest.mark.parametrize("phase", MAY_ABORT)
def test_abort_before_commit_changes_nothing(suite: Suite, arrange: Arranger, phase: Phase) -> None:
    """I13, I4: what is raised as a phase up to commit begins leaves units, memory and state.

    If this fails, check that what was prepared is discarded whatever is raised.
    """
    subject, op = arranged(suite, arrange, Stage.TRAIN)
    with subject.boundary():
        _raise_at(subject, phase)
        with refused(subject, Interrupted, doing=f"{op}, interrupted in {phase},"):
            subject.perform(op)
        subject.adapter.watch(None)
        before = subject.units
        subject.perform(op)
        same_units(apply(op, before), subject.units, f"{op}, tried again")


def test_error_after_commit_keeps_the_receipt(suite: Suite, arrange: Arranger) -> None:
    """I5, I13: a primitive interrupted as release begins is done: asked for again, it does nothing.

    A controller that starts anew after a crash relies on it. If this fails, check that the receipt
    is written when units have switched, before anything is raised.
    """
    subject, op = arranged(suite, arrange, Stage.TRAIN)
    after = apply(op, subject.units)
    with subject.boundary():
        _raise_at(subject, Phase.RELEASE)
        with pytest.raises(Interrupted):
            subject.perform(op)
        subject.adapter.watch(None)
        same_units(after, subject.units, f"{op}, interrupted in release,")
        memory = subject.memory()
        try:
            receipt = subject.perform(op)
        except Exception as error:
            pytest.fail(f"I5 once: {op} again raised {type(error).__name__}: {error}")
        require(receipt.op_id == op.op_id, "I5 once", f"{op} again gave {receipt}")
        same_units(after, subject.units, f"{op} again")
        require(subject.memory() == memory, "I5 once", f"{op} again changed memory")


def test_relinking_again_changes_nothing(suite: Suite, arrange: Arranger) -> None:
    """I12: the epoch switch may be repeated, as a controller does that died in it.

    If this fails, check that relink builds what there shall be, and adds nothing to what there is.
    """
    fixed = arrange.fixed(3)
    subject, op = arranged(suite, arrange, Stage.TRAIN)
    subject.step()
    with subject.boundary():
        subject.perform(op)
        plan = Plan.of_units(subject.units)
        for _ in range(2):
            subject.adapter.relink(plan)
    with subject.boundary():
        subject.adapter.relink(plan)
    for wanted in fixed[1:]:
        found = subject.step()
        require(
            (found.step, found.sample_ids) == (wanted.step, wanted.sample_ids),
            "I12 resume",
            f"step {found.step} consumed {found.sample_ids}, not {wanted.sample_ids}",
        )


@pytest.mark.needs(Feature.UNIT_LOSS, Kind.SPLIT)
@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.TRANSFER, Phase.VERIFY])
def test_refused_memory_leaves_the_old_units(arrange: Arranger, phase: Phase) -> None:
    """I4: memory refused before commit is an error that changes nothing.

    If this fails, check that an allocation that fails late is handled like one that fails early.
    """
    subject = arrange(Stage.TRAIN, TP2)
    op = subject.split(subject.own()[0], ONE)
    subject.harness.fail_at(Fault.REFUSE_MEMORY, 0, phase, None)
    with subject.boundary(), refused(subject, NereusError, doing=f"{op} without memory"):
        subject.perform(op)


@pytest.mark.needs(Feature.UNIT_LOSS, Kind.SPLIT)
def test_refused_memory_in_commit_is_all_or_nothing(arrange: Arranger) -> None:
    """I4: memory refused in commit is tried again, or an error that changes nothing.

    If this fails, check that commit neither stops half-way nor hides what it could not do.
    """
    subject = arrange(Stage.TRAIN, TP2)
    op, before = subject.split(subject.own()[0], ONE), subject.units
    states = {unit: subject.state(unit) for unit in before}
    subject.harness.fail_at(Fault.REFUSE_MEMORY, 0, Phase.COMMIT, None)
    with subject.boundary():
        try:
            subject.perform(op)
        except NereusError:
            same_units(before, subject.units, f"{op}, without memory in commit,")
            for unit, state in states.items():
                same_state(state, subject.state(unit), f"{op}, without memory in commit,")
        else:
            same_units(apply(op, before), subject.units, f"{op}, committed at the second attempt,")
            for made in op.into:
                same_state(states[op.parent], subject.state(made), f"{op}, committed again,")


@pytest.mark.needs(Feature.UNIT_LOSS, Kind.EXTEND)
@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.TRANSFER])
def test_corrupted_state_is_caught_before_commit(arrange: Arranger, phase: Phase) -> None:
    """I2, I4: state that arrives changed is noticed in verify, and the old units stay.

    If this fails, check what verify compares: it must be what was sent with what has arrived.
    """
    subject = arrange(Stage.TRAIN, spare=1)
    op = subject.extend(subject.spare)
    subject.harness.fail_at(Fault.CORRUPT, 0, phase, None)
    with subject.boundary(), refused(subject, NereusError, doing=f"{op} with a corrupted bucket"):
        subject.perform(op)
