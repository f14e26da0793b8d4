"""Relink: the job after a transition is the job of the fixed layout."""

from __future__ import annotations

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import TOLERANCE, close, require, same_state
from nereus_conformance.suite import Suite
from nereus_core.capabilities import Feature
from nereus_core.layout import Layout
from nereus_core.primitives import Kind, Primitive
from nereus_core.workload import Stage

ONE, TP2 = Layout(1, 1), Layout(2, 1)
STEPS = 5


class Interrupted:
    """Five steps of a job whose train stage changes by every primitive the adapter can do."""

    def __init__(self, suite: Suite, arrange: Arranger) -> None:
        self.fixed = arrange.fixed(STEPS)
        can = {kind: suite.holds((kind, Stage.TRAIN)) for kind in Kind}
        grows = can[Kind.EXTEND]
        start = (ONE, 1) if grows or not can[Kind.SPLIT] else (TP2, 1)
        subject = arrange(Stage.TRAIN, *start, spare=2 - start[0].num_devices)
        self.results = [subject.step()]
        self.ops: list[Primitive] = []
        for kind in (Kind.EXTEND, Kind.SPLIT, Kind.MERGE, Kind.SPLIT, Kind.DESTROY):
            own = subject.own()
            if not can[kind] or len(self.results) == STEPS:
                continue
            if kind is Kind.EXTEND and len(own) == 1 and subject.spare:
                op: Primitive = subject.extend(subject.spare)
            elif kind is Kind.SPLIT and own[0].layout == TP2:
                op = subject.split(own[0], ONE)
            elif kind is Kind.MERGE and len(own) == 2:
                op = subject.merge(own, TP2)
            elif kind is Kind.DESTROY and len(own) == 2:
                op = subject.destroy(own[0])
            else:
                continue
            subject.transition(op)
            self.ops.append(op)
            self.results.append(subject.step())
        if not self.ops:
            pytest.skip("the adapter has no primitive on train to interrupt a job with")
        while len(self.results) < STEPS:
            self.results.append(subject.step())
        self.tolerance = TOLERANCE[subject.job.precision.compute]
        self.batch = subject.job.global_batch

    def __str__(self) -> str:
        return ", ".join(map(str, self.ops))


@pytest.fixture(scope="module")
def interrupted(suite: Suite, arrange: Arranger) -> Interrupted:
    """Run the interrupted job once for the cases that look at it."""
    return Interrupted(suite, arrange)


@pytest.mark.needs(Kind.EXTEND)
def test_relink_rebuilds_data_parallel_groups(arrange: Arranger) -> None:
    """After relink the units average their gradients: they stay identical step after step.

    If this fails, check that gradients are reduced over the units alive, and over no other.
    """
    subject = arrange(Stage.TRAIN, spare=1)
    subject.transition(subject.extend(subject.spare))
    for _ in range(2):
        subject.step()
    first, second = subject.own()
    same_state(subject.state(first), subject.state(second), "two steps with two units")


def test_global_batch_is_unchanged(interrupted: Interrupted) -> None:
    """I10: every step trains on as many prompts as before, however many units share them.

    If this fails, check that each unit takes its part of the global batch, not a batch of its own.
    """
    for result in interrupted.results:
        require(
            len(result.sample_ids) == interrupted.batch,
            "I10 semantics",
            f"step {result.step} trained on {len(result.sample_ids)} prompts, "
            f"the global batch is {interrupted.batch}; before it: {interrupted}",
        )


@pytest.mark.needs(Feature.DATALOADER_STATE)
def test_no_sample_is_repeated_or_skipped(interrupted: Interrupted) -> None:
    """I10: the prompts of every step, in order, are those of the job whose plan never changes.

    If this fails, check the position of the data loader, and that units take slices in order of id.
    """
    for found, wanted in zip(interrupted.results, interrupted.fixed, strict=True):
        require(
            found.sample_ids == wanted.sample_ids,
            "I10 semantics",
            f"step {found.step} trained on {found.sample_ids}, the fixed plan on "
            f"{wanted.sample_ids}; transitions: {interrupted}",
        )


@pytest.mark.needs(Feature.OPTIMIZER_STATE, Feature.RNG_STATE, Feature.DATALOADER_STATE)
def test_loss_follows_the_fixed_layout(interrupted: Interrupted) -> None:
    """I10: losses are those of the job whose plan never changes, within rounding.

    If this fails, check the normalisation of the loss over units, then moments and step counts.
    """
    for found, wanted in zip(interrupted.results, interrupted.fixed, strict=True):
        for model, loss in wanted.losses.items():
            require(
                close(found.losses[model], loss, interrupted.tolerance),
                "I10 semantics",
                f"step {found.step}: loss of {model} is {found.losses[model]!r}, with the fixed "
                f"plan {loss!r} (tolerance {interrupted.tolerance:g}); transitions: {interrupted}",
            )


@pytest.mark.needs(Feature.OPTIMIZER_STATE, Feature.RNG_STATE, Feature.DATALOADER_STATE)
def test_gradients_match_the_fixed_layout(interrupted: Interrupted) -> None:
    """I10: gradient norms are those of the job whose plan never changes, within rounding.

    If this fails, check that a replicated parameter is counted once in the norm under tp and pp.
    """
    # A norm adds squares: relative rounding doubles; the rest of the factor is for cancellation.
    tolerance = 10 * interrupted.tolerance
    for found, wanted in zip(interrupted.results, interrupted.fixed, strict=True):
        for model, norm in wanted.grad_norms.items():
            require(
                close(found.grad_norms[model], norm, tolerance),
                "I10 semantics",
                f"step {found.step}: gradient norm of {model} is {found.grad_norms[model]!r}, with "
                f"the fixed plan {norm!r} (tolerance {tolerance:g}); transitions: {interrupted}",
            )
