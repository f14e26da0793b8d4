import threading
from dataclasses import replace

import pytest

from nereus_core.adapter import Fingerprint
from nereus_core.capabilities import Capabilities, Feature, since, unsupported
from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import (
    DevicesBusy,
    Diverged,
    Infeasible,
    NoSuchUnit,
    NotAtBoundary,
    PrimitiveError,
    UnitLost,
    Unsupported,
)
from nereus_core.layout import Layout
from nereus_core.ledger import Done, Ledger, Standing, require_identical
from nereus_core.primitives import Destroy, Extend, Merge, OpId
from nereus_core.sim.models import TINY
from nereus_core.traffic import primitive_bytes
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, FLOAT32, Job, Stage, grpo

CLUSTER = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
D = CLUSTER.devices
JOB = Job(grpo(), {"actor": TINY, "ref": TINY}, CLUSTER, 8, 8, 8, FLOAT32)
ONE, TWO = Layout(1, 1), Layout(2, 1)


def train(serial, *devices, layout=ONE):
    return Unit(UnitId(ACTOR_TRAIN, serial), layout, devices)


PAIR = UnitMap([train(0, D[0]), train(1, D[1])])
STANDING = Standing(JOB, PAIR, frozenset({ACTOR_TRAIN}))
GROW = Extend(OpId("grow"), (train(0, D[0]).id,), train(2, D[2]))


def never(op, units, enter):
    raise AssertionError(f"{op} was performed")


def test_a_primitive_is_performed_once_and_its_receipt_says_what_was_done():
    now_s = iter([2.0, 5.0])
    ledger, calls = Ledger(Capabilities.everything(), clock=lambda: next(now_s)), []

    def do(op, units, enter):
        calls.append((op, units))
        return Done(7, 8, {D[2]: 9})

    receipt = ledger.perform(GROW, lambda: STANDING, do)
    again = ledger.perform(GROW, lambda: replace(STANDING, held=None), do)

    assert again is receipt
    assert calls == [(GROW, PAIR)]
    assert (receipt.created, receipt.ended) == ((GROW.unit,), ())
    assert (receipt.acquired, receipt.released) == ({D[2]}, frozenset())
    assert (receipt.moved_bytes, receipt.kept_bytes, receipt.elapsed_s) == (7, 8, 3.0)
    assert receipt.peak_bytes == {D[2]: 9}
    other = Destroy(GROW.op_id, train(1, D[1]).id)
    with pytest.raises(PrimitiveError, match="was used for extend"):
        ledger.perform(other, lambda: STANDING, never)


def test_what_failed_has_no_receipt_and_may_be_tried_again():
    ledger = Ledger(Capabilities.everything())

    def fail(op, units, enter):
        raise Infeasible("no room")

    with pytest.raises(Infeasible) as raised:
        ledger.perform(GROW, lambda: STANDING, fail)

    assert raised.value.op is GROW
    assert (
        ledger.perform(GROW, lambda: STANDING, lambda op, units, enter: Done()).op_id == GROW.op_id
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"held": None}, NotAtBoundary, "outside a safe boundary"),
        ({"held": frozenset({ACTOR_GENERATE})}, NotAtBoundary, "outside a safe boundary"),
        ({"inside": (ACTOR_TRAIN,)}, NotAtBoundary, "reads actor/train, which runs"),
        ({"alive": PAIR.replace([GROW.sources[0]], ())}, NoSuchUnit, "no unit actor/train#0"),
        (
            {"alive": PAIR.replace([GROW.sources[0]], ()), "lost": {GROW.sources[0]}},
            UnitLost,
            "a device failed",
        ),
        ({"job": JOB.on(CLUSTER.without({D[2]}))}, Infeasible, "has failed"),
    ],
)
def test_what_may_not_run_now_is_refused_before_it_is_performed(change, error, message):
    ledger = Ledger(Capabilities.everything())

    with pytest.raises(error, match=message):
        ledger.perform(GROW, lambda: replace(STANDING, **change), never)


def test_a_parked_unit_is_read_until_a_device_of_it_fails():
    gone = PAIR.replace([GROW.sources[0]], ())
    standing = replace(STANDING, alive=gone, parked=UnitMap([train(0, D[0])]))
    read = []
    ledger = Ledger(Capabilities.everything())

    ledger.perform(GROW, lambda: standing, lambda op, units, enter: read.append(units) or Done())

    assert read == [PAIR]
    late = replace(GROW, op_id=OpId("late"))
    broken = replace(standing, job=JOB.on(CLUSTER.without({D[0]})))
    with pytest.raises(UnitLost):
        ledger.perform(late, lambda: broken, never)


def test_a_layout_that_the_model_does_not_allow_is_infeasible():
    wide = Unit(UnitId(ACTOR_TRAIN, 2), Layout(1, 3), (D[1], D[2], D[3]))
    op = Merge(OpId("wide"), (PAIR[train(1, D[1]).id].id,), wide)
    model = replace(TINY, num_layers=2)
    job = replace(JOB, models={"actor": model, "ref": model})

    with pytest.raises(Infeasible, match="merge"):
        Ledger(Capabilities.everything()).perform(op, lambda: replace(STANDING, job=job), never)


def test_what_is_not_declared_is_refused_with_the_declared_reason():
    everything = Capabilities.everything()
    fixed = replace(everything, extend={Stage.TRAIN: unsupported("a fixed world")})
    newer = replace(everything, extend={Stage.TRAIN: since("2.0")})

    for ledger, reason in (
        (Ledger(fixed), "a fixed world"),
        (Ledger(newer, backend_version="1.9"), "needs backend version 2.0"),
        (Ledger(replace(everything, extend={})), "undeclared"),
    ):
        with pytest.raises(Unsupported, match=reason):
            ledger.perform(GROW, lambda: STANDING, never)
    assert Ledger(newer, backend_version="2.0").perform(
        GROW, lambda: STANDING, lambda op, units, enter: Done()
    )


def test_pipeline_stages_that_are_not_declared_are_refused_whatever_the_model_allows():
    features = {Feature.PIPELINE_STAGES: unsupported("no pipelines")}
    can = replace(Capabilities.everything(), features=features)
    op = replace(GROW, unit=Unit(GROW.unit.id, Layout(1, 2), (D[2], D[3])))
    by_rows = replace(JOB, row_cut=frozenset({ACTOR_TRAIN}))
    with pytest.raises(Unsupported, match="no pipelines"):
        Ledger(can).perform(op, lambda: replace(STANDING, job=by_rows), never)
    assert Ledger(can).perform(GROW, lambda: STANDING, lambda op, units, enter: Done())


def test_primitives_overlap_in_time_only_on_disjoint_devices():
    ledger = Ledger(Capabilities.everything())
    entered, leave = threading.Event(), threading.Event()

    def hold(op, units, enter):
        entered.set()
        assert leave.wait(10.0)
        return Done()

    thread = threading.Thread(target=ledger.perform, args=(GROW, lambda: STANDING, hold))
    thread.start()
    try:
        assert entered.wait(10.0)
        same_source = Extend(OpId("same"), GROW.sources, train(3, D[3]))
        with pytest.raises(DevicesBusy, match=r"grow \(in progress\)"):
            ledger.perform(same_source, lambda: STANDING, never)
        disjoint = Extend(OpId("disjoint"), (train(1, D[1]).id,), train(4, D[3]))
        ledger.perform(disjoint, lambda: STANDING, lambda op, units, enter: Done())
    finally:
        leave.set()
        thread.join(10.0)
    after = Extend(OpId("after"), GROW.sources, train(5, D[3]))
    ledger.perform(after, lambda: STANDING, lambda op, units, enter: Done())


@pytest.mark.parametrize(
    ("tensors", "steps", "named"), [({"param/w": "b"}, {"step": 1}, "param/w"),
                                    ({"param/w": "a"}, {"step": 2}, "step")]
)  # fmt: skip
def test_units_that_differ_do_not_merge(tensors, steps, named):
    op = Merge(OpId("m"), tuple(PAIR), train(2, D[0], D[1], layout=TWO))
    first, second = op.parents
    found = {
        first: Fingerprint(first, {"param/w": "a"}, {"step": 1}),
        second: Fingerprint(second, tensors, steps),
    }

    with pytest.raises(Diverged, match=named):
        require_identical(op, found.__getitem__)
    require_identical(op, lambda unit: found[first])


def test_bytes_of_a_primitive_are_what_devices_need_and_what_they_hold():
    whole = TINY.num_params * FLOAT32.train_bytes
    grow = Merge(OpId("m"), (train(0, D[0]).id,), train(2, D[0], D[1], layout=TWO))
    moved, kept = primitive_bytes(grow, PAIR, JOB)

    assert primitive_bytes(GROW, PAIR, JOB) == (whole, 0)
    assert moved + kept >= whole  # norms are on both ranks
    assert 0 < kept < whole
    assert primitive_bytes(Destroy(OpId("d"), train(1, D[1]).id), PAIR, JOB) == (0, 0)
