"""Safe boundaries: when they open, what they hold, what they leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import refused, require
from nereus_conformance.subject import BOUNDARY_S, THREAD_S, Subject
from nereus_conformance.suite import Suite
from nereus_core.capabilities import Feature
from nereus_core.errors import BoundaryTimeout, NotAtBoundary
from nereus_core.layout import Layout
from nereus_core.primitives import Kind, Primitive
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Stage

SHORT_S = 0.2
"""A boundary that must not open is given this long to open; chosen, not measured."""


def _some_primitive(suite: Suite, subject: Subject, stage: Stage) -> Primitive:
    """Build a primitive on the stage that the adapter declares it can do."""
    first = subject.own()[0]
    builders: dict[Kind, Callable[[], Primitive]] = {
        Kind.SPLIT: lambda: subject.split(first, Layout(1, 1)),
        Kind.DESTROY: lambda: subject.destroy(first),
        Kind.EXTEND: lambda: subject.extend(subject.spare, Layout(1, 1)),
        Kind.MERGE: lambda: subject.merge([first], first.layout),
    }
    for kind, build in builders.items():
        if suite.holds((kind, stage)):
            return build()
    pytest.skip(f"the adapter has no primitive on {stage}")


def test_primitive_outside_a_boundary_is_refused(
    suite: Suite, arrange: Arranger, stage: Stage
) -> None:
    """I8: a primitive outside a boundary raises NotAtBoundary and does nothing.

    If this fails, check that each primitive looks for the open boundary before anything else.
    """
    subject = arrange(stage, Layout(2, 1))
    op = _some_primitive(suite, subject, stage)
    with refused(subject, NotAtBoundary, f"I8 boundary: {op} outside a boundary"):
        subject.perform(op)


def test_boundary_waits_for_the_step_in_flight(arrange: Arranger) -> None:
    """A boundary asked for during a step opens when the step has ended, and says so.

    If this fails, check that the boundary waits for the whole step, not for one stage.
    """
    subject = arrange()
    opened: list[int] = []

    def enter() -> None:
        with subject.boundary() as boundary:
            opened.append(boundary.step)

    waiting = threading.Thread(target=enter, daemon=True)
    with subject.harness.running(ACTOR_TRAIN):
        waiting.start()
    waiting.join(THREAD_S)
    require(opened == [1], "I8 boundary", f"opened after {opened} steps, should be after 1")


def test_boundary_does_not_nest(arrange: Arranger) -> None:
    """A boundary inside a boundary is refused at once, and the outer one stays as it is.

    If this fails, check that entering looks for an open boundary before it waits.
    """
    subject = arrange()
    with subject.boundary() as outer:
        with pytest.raises(NotAtBoundary), subject.boundary():
            pass
        assert outer.stages == frozenset(subject.job.workload.stages)
    subject.step()


def test_only_named_stages_are_held(suite: Suite, arrange: Arranger) -> None:
    """A primitive on a stage that the boundary does not hold is refused.

    If this fails, check that the stages given to boundary() are kept and compared.
    """
    subject = arrange(Stage.TRAIN, Layout(2, 1))
    op = _some_primitive(suite, subject, Stage.TRAIN)
    with subject.boundary(REF_INFER) as boundary:
        require(
            boundary.stages == frozenset({REF_INFER}), "I8 boundary", f"holds {boundary.stages}"
        )
        with refused(subject, NotAtBoundary, f"I8 boundary: {op} while only ref/infer is held"):
            subject.perform(op)


def test_job_steps_after_a_boundary(arrange: Arranger) -> None:
    """I12: a boundary in which nothing happened leaves a job that takes its next step.

    If this fails, check what the boundary stops and forgets to start again.
    """
    subject = arrange()
    first = subject.step()
    with subject.boundary():
        pass
    require(subject.step().step == first.step + 1, "I12 resume", "the next step was not taken")


def test_job_steps_after_an_error_inside_a_boundary(arrange: Arranger) -> None:
    """I12: an error inside a boundary is passed on, and the job takes its next step.

    If this fails, check that leaving the boundary is in a finally.
    """
    subject = arrange()
    subject.step()
    with pytest.raises(ZeroDivisionError), subject.boundary():
        raise ZeroDivisionError
    require(subject.step().step == 1, "I12 resume", "the next step was not taken")


def test_timeout_names_the_stage_still_running(arrange: Arranger) -> None:
    """A boundary that does not open in time raises BoundaryTimeout naming the stage in flight.

    If this fails, check where the adapter reads which stage runs.
    """
    subject = arrange()
    with (
        subject.harness.running(ACTOR_TRAIN),
        pytest.raises(BoundaryTimeout) as info,
        subject.adapter.boundary(subject.job.workload.stages, timeout_s=SHORT_S),
    ):
        pass
    require(str(ACTOR_TRAIN) in str(info.value), "I8 boundary", f"{info.value} names no stage")
    subject.step()


@pytest.mark.needs(Feature.ASYNC_BOUNDARY)
def test_async_boundary_opens_at_weight_sync(arrange: Arranger) -> None:
    """In an asynchronous job a boundary for training opens while generation goes on.

    If this fails, check that the boundary waits for weight synchronisation and not for rollouts.
    """
    subject = arrange(job=arrange.job(asynchronous=True))
    subject.step()
    with (
        subject.harness.running(ACTOR_GENERATE),
        subject.adapter.boundary([ACTOR_TRAIN], timeout_s=BOUNDARY_S) as boundary,
    ):
        assert boundary.stages == frozenset({ACTOR_TRAIN})
    subject.step()
