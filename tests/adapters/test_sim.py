import threading
from dataclasses import replace

import pytest

from nereus_adapters.sim import nereus_create_adapter, nereus_launch
from nereus_adapters.sim.harness import SimHarness
from nereus_core.adapter import Adapter
from nereus_core.config import NereusConfig
from nereus_core.errors import (
    ConfigError,
    DevicesBusy,
    NotAtBoundary,
    OutOfDeviceMemory,
    PlanError,
    PrimitiveError,
    UnitLost,
    WrongHandle,
)
from nereus_core.harness import Harness
from nereus_core.launched import Launched
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, Extend, Merge, OpId, Split, apply
from nereus_core.state import TRAIN_SLOTS, needed_elements, placed
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

ONE, TP2, TP4 = Layout(1, 1), Layout(2, 1), Layout(4, 1)
OP = OpId("op")


@pytest.fixture
def harness():
    return SimHarness()


def launch(harness, **placements):
    """Launch with placements given by stage name: (layout, first device, devices)."""
    job = harness.job()
    devices = job.cluster.devices
    stages = {"train": ACTOR_TRAIN, "generate": ACTOR_GENERATE, "infer": REF_INFER}
    plan = {stage: Placement(ONE, (devices[3:4],)) for stage in stages.values()}
    for name, (layout, first, count) in placements.items():
        plan[stages[name]] = Placement.packed(layout, devices[first : first + count])
    return harness.launch(job, Plan(plan))


def train(adapter, serial=0):
    return adapter.units()[UnitId(ACTOR_TRAIN, serial)]


def pieces(parent, op_id=OP):
    into = tuple(Unit(UnitId(ACTOR_TRAIN, 10 + i), ONE, (d,)) for i, d in enumerate(parent.devices))
    return Split(op_id, parent.id, into)


def everything(adapter):
    return adapter.boundary(adapter.job().workload.stages, timeout_s=5.0)


def same(one, other):
    return one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)


def test_adapter_and_harness_are_what_the_core_asks_for(harness):
    assert isinstance(launch(harness), Adapter)
    checked: Harness = harness
    assert checked.tier == "contract"


def test_a_device_that_fails_during_a_primitive_is_named_with_its_units(harness):
    adapter = launch(harness, train=(TP2, 0, 2))
    parent = train(adapter)
    world = harness.running_job.world
    before = adapter.units()
    world.inject(
        lambda name: name.startswith("carry") and "layers.2" in name,
        lambda: harness.fail(parent.devices[1]),
    )

    with everything(adapter):
        with pytest.raises(UnitLost) as info:
            adapter.split(pieces(parent))
        assert info.value.lost == (parent.id,)
        assert adapter.units() == before.intact([parent.devices[1]])
    assert world.used_bytes(parent.devices[0]) == 0


def test_a_primitive_that_fails_halfway_leaves_no_trace(harness):
    adapter = launch(harness, train=(TP2, 0, 2))
    parent = train(adapter)
    memory = {d: harness.memory_bytes(d) for d in adapter.job().cluster.devices}
    before = harness.peek(parent.id)

    def broken():
        raise ConnectionError("link down")

    harness.running_job.world.inject(lambda name: "layers.3" in name, broken)

    with everything(adapter):
        with pytest.raises(ConnectionError):
            adapter.split(pieces(parent))
        assert same(harness.peek(parent.id), before)
        assert {d: harness.memory_bytes(d) for d in memory} == memory
        receipt = adapter.split(pieces(parent))  # the same id: it was never done
    assert receipt.created == pieces(parent).into


def test_memory_is_refused_by_name_before_the_first_byte_moves(harness):
    adapter = launch(harness, train=(TP2, 0, 2))
    parent = train(adapter)
    world = harness.running_job.world
    room = adapter.job().cluster.device_spec.memory_bytes - world.used_bytes(parent.devices[1])
    world.reserve("ballast", {parent.devices[1]: room - 1000}, "ballast")
    carried = []
    world.inject(lambda name: name.startswith("carry"), lambda: carried.append(1))

    with everything(adapter), pytest.raises(OutOfDeviceMemory) as info:
        adapter.split(pieces(parent))

    assert info.value.device == parent.devices[1]
    assert info.value.op == pieces(parent)
    assert not carried


def test_a_parked_unit_gives_its_state_to_another(harness):
    adapter = launch(harness, train=(TP2, 0, 2))
    harness.step()
    unit, parked_at = train(adapter), train(adapter).devices
    before, steps = harness.peek(unit.id), adapter.fingerprint(unit.id).steps
    fresh = Unit(UnitId(ACTOR_TRAIN, 5), ONE, (adapter.job().cluster.devices[2],))

    with everything(adapter):
        adapter.destroy(Destroy(OpId("park"), unit.id, park=True))
        assert unit.id not in adapter.units()
        assert [harness.memory_bytes(d) for d in parked_at] == [0, 0]
        receipt = adapter.extend(Extend(OpId("fetch"), (unit.id,), fresh))
        assert same(harness.peek(fresh.id), before)
        assert adapter.fingerprint(fresh.id).steps == steps
        adapter.relink(Plan.of_units(adapter.units()))
        again = replace(fresh, id=UnitId(ACTOR_TRAIN, 6))
        with pytest.raises(PrimitiveError):
            adapter.extend(Extend(OpId("late"), (unit.id,), again))
    assert receipt.moved_bytes > 0
    assert harness.step().step == 1


def test_a_stage_may_swap_devices_with_another_by_parking(harness):
    adapter = launch(harness, train=(TP2, 0, 2), infer=(TP2, 2, 2), generate=(ONE, 0, 1))
    unit = train(adapter)
    before = harness.peek(unit.id)
    moved = Unit(UnitId(ACTOR_TRAIN, 1), TP2, adapter.job().cluster.devices[2:4])

    with everything(adapter):
        adapter.destroy(Destroy(OpId("a"), unit.id, park=True))
        adapter.extend(Extend(OpId("b"), (unit.id,), moved))
        assert same(harness.peek(moved.id), before)


def test_overlapping_primitives_are_refused_and_disjoint_ones_overlap(harness):
    adapter = launch(harness, train=(TP2, 0, 2), infer=(TP2, 2, 2))
    parent = train(adapter)
    reached, go_on = threading.Event(), threading.Event()

    def hold():
        reached.set()
        assert go_on.wait(10.0)

    harness.running_job.world.inject(lambda name: "layers.1" in name, hold)
    with everything(adapter):
        first = threading.Thread(target=adapter.split, args=(pieces(parent),))
        first.start()
        assert reached.wait(10.0)
        with pytest.raises(DevicesBusy, match="node0:0 by op"):
            adapter.split(replace(pieces(parent), op_id=OpId("other")))
        ref = adapter.units().of(REF_INFER)[0]
        into = tuple(Unit(UnitId(REF_INFER, 10 + i), ONE, (d,)) for i, d in enumerate(ref.devices))
        adapter.split(Split(OpId("ref"), ref.id, into))
        go_on.set()
        first.join(10.0)
    assert len(adapter.units().of(ACTOR_TRAIN)) == len(adapter.units().of(REF_INFER)) == 2


def test_an_op_id_stands_for_one_primitive(harness):
    adapter = launch(harness, train=(TP2, 0, 2))
    with everything(adapter):
        adapter.split(pieces(train(adapter)))
        with pytest.raises(PrimitiveError, match="needs its own"):
            adapter.destroy(Destroy(OP, UnitId(ACTOR_TRAIN, 10)))


def test_a_receipt_is_returned_after_the_boundary_too(harness):
    adapter = launch(harness, train=(TP2, 0, 2))
    op = pieces(train(adapter))
    with everything(adapter):
        receipt = adapter.split(op)

    assert adapter.split(op) is receipt


def test_state_of_a_running_stage_is_not_read(harness):
    adapter = launch(harness, train=(ONE, 0, 1))
    unit = Unit(UnitId(ACTOR_GENERATE, 5), ONE, (adapter.job().cluster.devices[1],))
    op = Extend(OP, (train(adapter).id,), unit)
    entered = threading.Event()

    with adapter.boundary([ACTOR_GENERATE], timeout_s=5.0):
        gate = harness.running_job.gate

        def work():
            with gate.stages(ACTOR_TRAIN):
                entered.set()
                done.wait(10.0)

        done = threading.Event()
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(10.0)
        with pytest.raises(NotAtBoundary, match="which runs"):
            adapter.extend(op)
        done.set()
        thread.join(10.0)
        adapter.extend(op)


def test_a_unit_that_grows_keeps_what_it_holds(harness):
    adapter = launch(harness, train=(ONE, 0, 1))
    harness.step()
    parent, devices = train(adapter), adapter.job().cluster.devices
    before, units = harness.peek(parent.id), adapter.units()
    op = Merge(OP, (parent.id,), Unit(UnitId(ACTOR_TRAIN, 1), TP4, devices))

    with everything(adapter):
        receipt = adapter.merge(op)

    model, precision = adapter.job().model(ACTOR_TRAIN), adapter.job().precision
    needed = needed_elements(placed(model, ONE, parent.devices), placed(model, TP4, devices))
    assert receipt.moved_bytes == needed * precision.train_bytes
    assert receipt.acquired == frozenset(devices[1:])
    assert adapter.units() == apply(op, units)
    assert same(harness.peek(op.into.id), before)


def test_peak_memory_of_a_primitive_stays_under_old_and_new_together(harness):
    adapter = launch(harness, train=(TP2, 0, 2))
    parent = train(adapter)
    old = {d: harness.memory_bytes(d) for d in parent.devices}
    with everything(adapter):
        receipt = adapter.split(pieces(parent))
    for device in parent.devices:
        new = harness.memory_bytes(device)
        assert receipt.peak_bytes[device] <= old[device] + new <= 2 * max(old[device], new)


def test_relink_to_another_plan_is_checked(harness):
    adapter = launch(harness, train=(TP2, 0, 2))
    bad = Plan({ACTOR_TRAIN: Placement(ONE, ())})
    with everything(adapter), pytest.raises(PlanError):
        adapter.relink(bad)


def test_counters_move_with_state(harness):
    adapter = launch(harness, train=(ONE, 0, 1))
    harness.step()
    unit = Unit(UnitId(ACTOR_TRAIN, 7), ONE, (adapter.job().cluster.devices[1],))
    with everything(adapter):
        adapter.extend(Extend(OP, (train(adapter).id,), unit))
    found = adapter.fingerprint(unit.id)

    assert found.steps == {"step": 1, "rng": 1, "weight_version": 1}
    assert found.tensors == adapter.fingerprint(train(adapter).id).tensors
    assert {k.partition("/")[0] for k in found.tensors} == {str(s) for s in TRAIN_SLOTS}


def test_a_foreign_handle_is_refused():
    with pytest.raises(WrongHandle, match=r"attaches to a nereus_core\.sim\.job\.SimJob, got int"):
        nereus_create_adapter("sim", 3, NereusConfig())
    assert nereus_create_adapter("other", 3, NereusConfig()) is None


CONFIG = {
    "adapter": "sim",
    "job": {"steps": 3, "global_batch": 8, "plan": {"actor/train": "tp2pp1dp2"}},
    "backend": {"events": [{"step": 0, "take": ["node0:1"]}, {"step": 1, "kill": ["node0:3"]}]},
}


def test_a_configured_job_runs_with_its_scripted_events():
    launched = nereus_launch("sim", NereusConfig.of(CONFIG))
    assert isinstance(launched, Launched)
    adapter = nereus_create_adapter("sim", launched.handle, NereusConfig.of(CONFIG))

    assert "actor/loss" in launched.step()
    assert {str(d) for d in adapter.observe().draining} == {"node0:1"}
    launched.step()
    assert len(adapter.units().of(ACTOR_TRAIN)) == 1
    with pytest.raises(UnitLost):
        launched.step()
    adapter.relink(Plan.of_units(adapter.units()))
    launched.step()
    assert launched.finished
    launched.close()


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("job", {"stepz": 3}, "job.stepz: unknown key. Did you mean 'steps'?"),
        ("job", {"model": "HUGE"}, "job.model: 'HUGE' is not in nereus_core.sim.models"),
        ("job", {"plan": {"actor/train": "tp2"}}, "expected e.g. 'tp2pp1dp2'"),
        ("job", {"plan": {"actor/train": "tp4pp1dp2"}}, "takes 8 devices, the cluster has 4"),
        ("job", {"plan": {"critic/train": "tp1pp1dp1"}}, "job.plan.critic/train: is not one of"),
        ("backend", {"device": "tpu"}, "backend.device: 'tpu' is unknown; known: a100-sxm-80gb"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_key(section, values, said):
    with pytest.raises(ConfigError) as info:
        nereus_launch("sim", NereusConfig.of({section: values}))
    assert said in str(info.value)
