"""Primitives that run at once, on devices that are disjoint and on devices that are not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import partitioned, require, same_state
from nereus_conformance.subject import Subject
from nereus_conformance.suite import Suite
from nereus_conformance.threads import together
from nereus_core.adapter import Receipt
from nereus_core.capabilities import Feature
from nereus_core.errors import PrimitiveError
from nereus_core.harness import Tier
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Kind, Primitive, Split, apply
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Stage

ONE, TP2, PP2 = Layout(1, 1), Layout(2, 1), Layout(1, 2)
BOTH = pytest.mark.needs(Kind.SPLIT, Kind.MERGE, stage=Stage.INFER)
NEEDS = pytest.mark.needs(
    Kind.SPLIT, Kind.MERGE, Feature.CONCURRENT_PRIMITIVES, Feature.COLOCATED_STAGES
)


def _two_stages(arrange: Arranger) -> Subject:
    """Launch training on devices 0 and 1, the reference on 2 and 3, generation on 3."""
    job = arrange.job()
    devices = job.cluster.healthy
    plan = {
        ACTOR_TRAIN: Placement(TP2, (devices[:2],)),
        REF_INFER: Placement(TP2, (devices[2:4],)),
        ACTOR_GENERATE: Placement(ONE, (devices[3:4],)),
    }
    return arrange.launch(job, Plan(plan), ACTOR_TRAIN)


def _splits(subject: Subject) -> list[Split]:
    return [subject.split(subject.units.of(s)[0], ONE) for s in (ACTOR_TRAIN, REF_INFER)]


def _require_receipts(ops: Sequence[Primitive], results: Sequence[object]) -> None:
    for op, result in zip(ops, results, strict=True):
        require(isinstance(result, Receipt), "I6 disjoint", f"{op} gave {result!r}")


@NEEDS
@BOTH
def test_disjoint_primitives_commute(arrange: Arranger) -> None:
    """I6: two primitives on disjoint devices give the same units and state in either order.

    If this fails, check state that both share: counters of groups, names of stores.
    """
    found = []
    for order in (1, -1):
        subject = _two_stages(arrange)
        ops = _splits(subject)
        with subject.boundary():
            for op in ops[::order]:
                subject.perform(op)
            found.append((subject.units, {u: subject.state(u) for u in subject.units}))
    (units, states), (other_units, other_states) = found
    require(units == other_units, "I6 disjoint", f"{units!r} or {other_units!r}, by order")
    for unit in units:
        same_state(states[unit], other_states[unit], f"the other order, on {unit},")


@pytest.mark.needs(Kind.SPLIT, Feature.CONCURRENT_PRIMITIVES)
def test_overlapping_primitives_are_refused(suite: Suite, arrange: Arranger) -> None:
    """Of two primitives on the same devices at once one wins, the other raises PrimitiveError.

    If this fails, check that devices are claimed before work begins, under one lock.
    """
    subject = arrange(Stage.TRAIN, TP2)
    merges = suite.holds((Kind.MERGE, Stage.TRAIN))
    before = subject.state(subject.own()[0])
    with subject.boundary():
        for _ in range(5 if merges and suite.tier is Tier.CONTRACT else 1):
            units, parent = subject.units, subject.own()[0]
            ops = [subject.split(parent, ONE), subject.split(parent, ONE)]  # other children
            results = together([partial(subject.perform, op) for op in ops])
            won = [op for op, r in zip(ops, results, strict=True) if isinstance(r, Receipt)]
            lost = [r for r in results if not isinstance(r, Receipt)]
            require(len(won) == 1, "I6 disjoint", f"{len(won)} of two overlapping splits won")
            require(
                isinstance(lost[0], PrimitiveError),
                "I6 disjoint",
                f"the loser raised {type(lost[0]).__name__}: {lost[0]}",
            )
            require(
                subject.units == apply(won[0], units),
                "I4 strong",
                f"units() is {subject.units!r} after {won[0]}",
            )
            partitioned(subject.units, subject)
            same_state(before, subject.state(subject.own()[0]), str(won[0]))
            if merges:
                subject.perform(subject.merge(subject.own(), TP2))


@NEEDS
@BOTH
def test_two_stages_transition_at_once(arrange: Arranger) -> None:
    """I6: primitives of two stages on disjoint devices run at once, and both are right.

    If this fails, check locks and groups that span the whole job.
    """
    subject = _two_stages(arrange)
    subject.step()
    states = {s: subject.state(subject.units.of(s)[0]) for s in (ACTOR_TRAIN, REF_INFER)}
    ops = _splits(subject)
    with subject.boundary():
        results = together([partial(subject.perform, op) for op in ops])
        _require_receipts(ops, results)
        for op in ops:
            for child in op.into:
                same_state(states[child.model_stage], subject.state(child), str(op))
        subject.adapter.relink(Plan.of_units(subject.units))
    subject.step()


@NEEDS
@BOTH
def test_no_deadlock_under_random_launch_order(suite: Suite, arrange: Arranger) -> None:
    """I6: whatever the order in which threads start, transitions there and back end, and rightly.

    By way of pipeline stages, where the adapter has them.

    If this fails, check that locks are taken in one order, and that no collective spans units that
    do not take part.
    """
    subject = _two_stages(arrange)
    states = {s: subject.state(subject.units.of(s)[0]) for s in (ACTOR_TRAIN, REF_INFER)}
    pipelines = suite.holds(Feature.PIPELINE_STAGES)
    with subject.boundary():
        for seed in range(100 if suite.tier is Tier.CONTRACT else 3):
            order = random.Random(f"{suite.seed}/{seed}")
            for layout in (ONE, PP2, TP2) if pipelines else (ONE, TP2):
                ops: list[Primitive] = []
                for stage in (ACTOR_TRAIN, REF_INFER):
                    own = subject.units.of(stage)
                    split = layout == ONE or len(own) == 1
                    ops.append(
                        subject.split(own[0], layout) if split else subject.merge(own, layout)
                    )
                order.shuffle(ops)
                results = together([partial(subject.perform, op) for op in ops])
                _require_receipts(ops, results)
    for stage, state in states.items():
        same_state(state, subject.state(subject.units.of(stage)[0]), "random launch orders")
