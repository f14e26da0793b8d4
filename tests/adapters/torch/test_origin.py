"""What never changes is loaded again; what finds no room on a device waits in host memory."""

import time

import numpy as np
import pytest

from nereus_core.errors import UnitLost
from nereus_core.events import EventLog
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Extend, Split
from nereus_core.transition import compile_transition, execute
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

pytestmark = pytest.mark.real

ONE = Layout(1, 1)


def plan(devices, ref):
    where = {ACTOR_TRAIN: devices[0], ACTOR_GENERATE: devices[1], REF_INFER: ref}
    return Plan({stage: Placement(ONE, ((device,),)) for stage, device in where.items()})


def test_a_job_that_loses_its_only_reference_goes_on_with_equal_losses(harness):
    job = harness.job()
    devices = job.cluster.devices
    harness.launch(job, plan(devices, devices[3]))
    wanted = [harness.step().losses for _ in range(3)]

    adapter = harness.launch(job, plan(devices, devices[3]))
    found = [harness.step().losses]
    harness.fail(devices[3])
    with pytest.raises(UnitLost, match="ref/infer#0"):
        harness.step()
    lost = adapter.job().cluster.failed
    graph = compile_transition(
        adapter.units(), plan(devices, devices[2]), adapter.job(), lost=lost, prefix="again",
        serials={REF_INFER: 1},
    )  # fmt: skip
    (op,) = graph.ops
    assert isinstance(op, Extend)
    assert op.sources == ()
    assert str(op).endswith("from its origin")
    with (
        adapter.boundary(job.workload.stages, timeout_s=60),
        EventLog(None, time.monotonic) as log,
    ):
        outcome = execute(graph, adapter, log=log, timeout_s=60, verify=True)
        adapter.relink(outcome.plan)
    assert outcome.moved_bytes > 0
    found += [harness.step().losses for _ in range(2)]
    assert found == wanted


def test_what_has_no_room_beside_the_old_shards_waits_in_host_memory(harness, tools):
    job = harness.job()
    adapter = harness.launch(job, tools.packed(job, {ACTOR_TRAIN: (Layout(2, 1), 1)}))
    hand = tools.Hand(adapter)
    harness.step()
    (parent,) = adapter.units().of(ACTOR_TRAIN)
    before = harness.peek(parent.id)
    held = harness.memory_bytes(hand.devices[1])
    limit = 10_000
    op = Split("s", parent.id, (hand.unit(ACTOR_TRAIN, Layout(1, 2), [0, 1]),), limit)
    with tools.at_boundary(adapter):
        receipt = adapter.split(op)
        after = harness.peek(op.into[0].id)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    largest = max(array.nbytes for array in before.values())
    end = harness.memory_bytes(hand.devices[1])
    # Beside what is held: what is staged, and at commit the tensor that is put together.
    assert receipt.peak_bytes[hand.devices[1]] <= max(held + limit, end) + largest
    harness.step()
