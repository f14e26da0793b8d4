"""Refusals, replays and readings of the adapter."""

from dataclasses import replace

import pytest

import nereus_adapters.torch as backend
from nereus_core.config import NereusConfig
from nereus_core.errors import (
    DevicesBusy,
    Diverged,
    Infeasible,
    LastUnit,
    NoSuchUnit,
    NotAtBoundary,
    OutOfDeviceMemory,
    PlanError,
    WrongHandle,
)
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.primitives import Destroy, Extend
from nereus_core.units import UnitId
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

pytestmark = pytest.mark.real


@pytest.fixture
def adapter(harness, tools):
    job = harness.job()
    return harness.launch(job, tools.packed(job, {ACTOR_TRAIN: (Layout(1, 1), 2)}))


@pytest.fixture
def hand(adapter, tools):
    return tools.Hand(adapter)


def test_impossible_requests_are_refused_by_name_and_the_job_goes_on(harness, tools, adapter, hand):
    units = adapter.units()
    held = {d: harness.memory_bytes(d) for d in hand.devices}
    with tools.at_boundary(adapter):
        with pytest.raises(Infeasible, match="tp=3 does not divide num_heads=4"):
            hand.extend(Layout(3, 1), [1, 2, 3], REF_INFER)
        with pytest.raises(Infeasible, match="a split stays on its parent's devices"):
            hand.split(Layout(2, 1), [0, 2])
        with pytest.raises(DevicesBusy, match="node0:1 by actor/train#1"):
            hand.extend(Layout(2, 1), [1, 2])
        with pytest.raises(NoSuchUnit, match="no unit actor/train#77"):
            adapter.destroy(Destroy("nobody", UnitId(ACTOR_TRAIN, 77)))
        with pytest.raises(Infeasible, match="actor/generate#0 holds no optimizer state"):
            hand.extend(Layout(1, 1), [2], sources=hand.ids(ACTOR_GENERATE))
        with pytest.raises(LastUnit, match="ref/infer#0"):
            hand.destroy(0, REF_INFER)
        assert adapter.units() == units
        assert {d: harness.memory_bytes(d) for d in hand.devices} == held
    harness.step()


def test_an_extension_onto_too_few_seats_or_a_dead_one_is_refused(harness, tools, adapter, hand):
    harness.fail(hand.devices[3])
    assert adapter.job().cluster.failed == {hand.devices[3]}
    assert adapter.observe().healthy == set(hand.devices[:3])
    with tools.at_boundary(adapter), pytest.raises(Infeasible, match="node0:3 has failed"):
        hand.extend(Layout(2, 1), [2, 3])
    harness.running_job.give([hand.devices[3]])
    harness.step()


def test_tp_above_kv_heads_replicates_them_or_is_refused(harness, tools, adapter, hand):
    """transformers#48307: it must not shard fine and then fail in the forward pass."""
    with tools.at_boundary(adapter):
        hand.destroy(1)
        hand.merge(Layout(4, 1), [0, 1, 2, 3])  # 4 ranks over 2 kv heads
    assert harness.step().losses["actor"] == harness.running_job.last.metrics["actor"].loss


def test_what_does_not_fit_is_refused_before_it_starts(harness, tools):
    job = harness.job()
    tight = replace(job.cluster.device_spec, memory_bytes=1_400_000)
    job = replace(job, cluster=replace(job.cluster, device_spec=tight))
    adapter = harness.launch(job, tools.packed(job, {REF_INFER: (Layout(4, 1), 1)}))
    hand = tools.Hand(adapter)
    held = {d: harness.memory_bytes(d) for d in hand.devices}
    with tools.at_boundary(adapter):
        with pytest.raises(OutOfDeviceMemory, match=r"on node0:0, which has 0\.00 GiB") as caught:
            hand.split(Layout(1, 1), [0], stage=REF_INFER)
        assert caught.value.need_bytes > 1_400_000
        assert {d: harness.memory_bytes(d) for d in hand.devices} == held
    harness.step()


def test_units_that_differ_do_not_merge(harness, tools, adapter, hand):
    harness.disturb(hand.ids(ACTOR_TRAIN)[1], "exp_avg/model.norm.weight")
    with (
        tools.at_boundary(adapter),
        pytest.raises(Diverged, match=r"differ in exp_avg/model\.norm\.weight"),
    ):
        hand.merge(Layout(2, 1), [0, 1])
    assert len(hand.ids(ACTOR_TRAIN)) == 2


def test_nothing_happens_outside_a_boundary(harness, adapter, hand):
    with pytest.raises(NotAtBoundary):
        hand.extend(Layout(1, 1), [2])
    with adapter.boundary([REF_INFER], timeout_s=60), pytest.raises(NotAtBoundary):
        hand.extend(Layout(1, 1), [2])


def test_the_same_op_id_does_nothing_again(tools, adapter, hand):
    op = Extend("again", hand.ids(ACTOR_TRAIN), hand.unit(ACTOR_TRAIN, Layout(1, 1), [2]))
    with tools.at_boundary(adapter):
        first = adapter.extend(op)
        units = adapter.units()
        assert adapter.extend(op) is first
        assert adapter.units() == units


def test_relink_holds_the_plan_against_the_units(tools, adapter, hand):
    with tools.at_boundary(adapter):
        hand.destroy(1)
        with pytest.raises(PlanError, match=r"actor/train: .* alive, the plan says tp1pp1dp2"):
            adapter.relink(tools.packed(adapter.job(), {ACTOR_TRAIN: (Layout(1, 1), 2)}))
        adapter.relink(Plan.of_units(adapter.units()))


def test_fingerprints_do_not_depend_on_the_layout(tools, adapter, hand):
    with tools.at_boundary(adapter):
        before = adapter.fingerprint(hand.ids(ACTOR_TRAIN)[0])
        hand.destroy(1)
        hand.merge(Layout(2, 2), [3, 1, 0, 2])
        after = adapter.fingerprint(hand.ids(ACTOR_TRAIN)[0])
    assert (after.tensors, after.steps) == (before.tensors, before.steps)
    assert len(after.tensors) == 3 * len({k.partition("/")[2] for k in after.tensors})


def test_a_foreign_handle_is_refused():
    with pytest.raises(WrongHandle, match="TorchJob, got str"):
        backend.nereus_create_adapter("torch", "job", NereusConfig())
    assert backend.nereus_create_adapter("sim", "job", NereusConfig()) is None


def test_the_declaration_is_complete():
    declaration = backend.nereus_declare_adapter()
    assert declaration.name == "torch"
    assert list(declaration.capabilities.missing()) == []
