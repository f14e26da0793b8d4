"""Destroy: a unit ends, and its memory is free."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest

from nereus_conformance.arrange import Arranger
from nereus_conformance.assertions import refused, require, same_state, same_units
from nereus_core.capabilities import Feature
from nereus_core.errors import LastUnit
from nereus_core.layout import Layout
from nereus_core.primitives import Kind, apply
from nereus_core.workload import Stage

ONE = Layout(1, 1)


@pytest.mark.needs(Kind.DESTROY)
def test_destroy_removes_the_unit(arrange: Arranger, stage: Stage) -> None:
    """The unit is not alive any more; all others are as before, and the job steps without it.

    If this fails, check that groups and routing forget the unit at relink.
    """
    subject = arrange(stage, num_units=2)
    before = subject.units
    op = subject.destroy(subject.own()[1])
    ops = subject.completed(op)
    subject.transition(*ops)
    same_units(reduce(lambda units, op: apply(op, units), ops, before), subject.units, str(op))
    subject.step()


@pytest.mark.needs(Kind.DESTROY)
def test_memory_is_free_when_destroy_returns(arrange: Arranger, stage: Stage) -> None:
    """I7: when destroy returns, nothing of the unit lies on its devices.

    If this fails, check references that outlive the unit: optimizer, graph, caching allocator.
    """
    subject = arrange(stage, num_units=2)
    unit = subject.own()[1]
    op = subject.destroy(unit)
    with subject.boundary():
        before = subject.memory()
        for done in subject.completed(op):  # units tied to it lie on its devices too
            subject.perform(done)
        after = subject.memory()
    for device in unit.devices:
        require(
            before[device] > 0 and after[device] == 0,
            "I7 released",
            f"after {op} {after[device]} of {before[device]} bytes lie on {device}",
        )


@pytest.mark.needs(Kind.DESTROY)
def test_memory_is_free_when_the_job_goes_on(arrange: Arranger, stage: Stage) -> None:
    """I7: once relinked, nothing of a destroyed unit lies on its devices, nor after the next step.

    If this fails, check what is kept for a way back, and what the next step brings up again.
    """
    subject = arrange(stage, num_units=2)
    unit = subject.own()[1]
    op = subject.destroy(unit)
    before = subject.memory()
    subject.transition(op)
    linked = subject.memory()
    subject.step()
    stepped = subject.memory()
    for device in unit.devices:
        require(
            before[device] > 0 and linked[device] == stepped[device] == 0,
            "I7 released",
            f"of {before[device]} bytes on {device} {linked[device]} lie there after {op} and "
            f"relink, {stepped[device]} after the next step",
        )


@pytest.mark.needs(Kind.DESTROY)
def test_destroy_of_the_last_unit_is_refused(arrange: Arranger, stage: Stage) -> None:
    """The only unit of a stage is not destroyed: its state would be gone.

    If this fails, check that preconditions (`primitives.check`) come first.
    """
    subject = arrange(stage)
    op = subject.destroy(subject.own()[0])
    with subject.boundary(), refused(subject, LastUnit, str(op)):
        subject.perform(op)


@pytest.mark.needs(Kind.DESTROY, Kind.EXTEND)
def test_released_devices_can_be_extended_onto(arrange: Arranger, stage: Stage) -> None:
    """What destroy released can be acquired at once, and the new unit is whole.

    If this fails, check that release is complete when destroy returns.
    """
    subject = arrange(stage, num_units=2)
    kept, gone = subject.own()
    before = subject.state(kept)
    destroy = subject.destroy(gone)
    with subject.boundary():
        receipt = subject.perform(destroy)
        require(
            receipt.released == frozenset(gone.devices), "I1 devices", f"{destroy} kept a device"
        )
        extend = subject.extend(gone.devices)
        subject.perform(extend)
        same_state(before, subject.state(extend.unit), str(extend))


@pytest.mark.needs(Kind.DESTROY, Feature.PARTIAL_ROLLOUT, stage=Stage.GENERATE)
def test_destroy_drains_requests_in_flight(arrange: Arranger) -> None:
    """Requests in flight survive the end of their unit: no prompt is dropped.

    If this fails, check where the unit's unfinished requests go.
    """
    subject = arrange(Stage.GENERATE, num_units=2, job=arrange.job(asynchronous=True))
    first = subject.step()
    subject.transition(subject.destroy(subject.own()[1]))
    following = [subject.step(), subject.step()]
    batch = subject.job.global_batch
    for result in (first, *following):
        require(
            len(set(result.sample_ids)) == batch,
            "I10 semantics",
            f"step {result.step} trained on {len(set(result.sample_ids))} of {batch} prompts",
        )


@pytest.mark.needs(Kind.DESTROY)
def test_no_process_outlives_its_unit(arrange: Arranger) -> None:
    """Destroying what was extended leaves no more processes than before.

    If this fails, check that what was started for the unit ends with it.
    """
    if not Path("/proc/self/task").exists():
        pytest.skip("processes are counted in /proc, which this system has not")
    subject = arrange(Stage.TRAIN, num_units=2)
    before = _descendants()
    subject.transition(subject.destroy(subject.own()[1]))
    more = _descendants() - before
    assert not more, f"processes {sorted(more)} were started and live on"


def _descendants() -> set[int]:
    """Return the ids of all processes below this one."""
    found: set[int] = set()
    waiting = [Path("/proc/self")]
    while waiting:
        for children in waiting.pop().glob("task/*/children"):
            try:
                pids = {int(pid) for pid in children.read_text(encoding="ascii").split()}
            except OSError:  # it ended meanwhile
                continue
            waiting += [Path(f"/proc/{pid}") for pid in pids - found]
            found |= pids
    return found
