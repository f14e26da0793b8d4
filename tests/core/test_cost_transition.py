import pytest

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel
from nereus_core.cost.transition import bytes_to_move, plan_bytes_to_move
from nereus_core.device_specs import CPU_SEAT, INFINIBAND_HDR, LOOPBACK
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, Extend, Merge, OpId, Split
from nereus_core.sim.models import TINY
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, FLOAT32, Job, grpo

CLUSTER = Cluster.homogeneous(2, 4, CPU_SEAT, LOOPBACK, INFINIBAND_HDR)
JOB = Job(grpo(), {"actor": TINY, "ref": TINY}, CLUSTER, 16, 64, 256)
D = CLUSTER.devices


def unit(serial: int, layout: Layout, devices, stage=ACTOR_TRAIN) -> Unit:
    return Unit(UnitId(stage, serial), layout, tuple(devices))


def seconds(op, units) -> float:
    return CostModel(JOB).primitive(op, units).mean_s


def test_destroying_is_cheapest_and_parking_costs_a_copy():
    units = UnitMap([unit(0, Layout(2, 1), D[:2]), unit(1, Layout(2, 1), D[2:4])])
    gone = seconds(Destroy(OpId("a"), UnitId(ACTOR_TRAIN, 1)), units)
    parked = seconds(Destroy(OpId("b"), UnitId(ACTOR_TRAIN, 1), park=True), units)
    extended = seconds(
        Extend(OpId("c"), (UnitId(ACTOR_TRAIN, 0),), unit(2, Layout(2, 1), D[4:6])), units
    )
    assert 0 < gone < parked < extended


def test_a_train_unit_moves_its_moments_too():
    units = UnitMap([unit(0, Layout(1, 1), D[:1]), unit(0, Layout(1, 1), D[:1], ACTOR_GENERATE)])
    source = (UnitId(ACTOR_TRAIN, 0),)
    train = seconds(Extend(OpId("a"), source, unit(1, Layout(), D[1:2])), units)
    follower = seconds(Extend(OpId("b"), source, unit(1, Layout(), D[1:2], ACTOR_GENERATE)), units)
    assert train > follower


def test_a_split_that_keeps_what_it_has_moves_less_than_a_merge_that_gathers():
    tp2 = UnitMap([unit(0, Layout(1, 2), D[:2])])
    split = Split(OpId("s"), UnitId(ACTOR_TRAIN, 0), (unit(1, Layout(1, 1), D[:1]),))
    two = UnitMap([unit(0, Layout(1, 1), D[:1]), unit(1, Layout(1, 1), D[1:2])])
    into = unit(2, Layout(1, 2), D[:2])
    merge = Merge(OpId("m"), (UnitId(ACTOR_TRAIN, 0), UnitId(ACTOR_TRAIN, 1)), into)
    # Two whole copies hold all that their two halves need; one child of two halves lacks a half.
    assert seconds(merge, two) < seconds(split, tp2)


def test_a_parked_source_is_priced_though_it_is_no_unit_any_more():
    op = Extend(OpId("a"), (UnitId(ACTOR_TRAIN, 7),), unit(8, Layout(2, 1), D[:2]))
    assert seconds(op, UnitMap([])) > seconds(
        Destroy(OpId("b"), UnitId(ACTOR_TRAIN, 8)), UnitMap([op.unit])
    )


def test_bytes_to_move_count_what_is_needed_and_not_held():
    whole = Placement.packed(Layout(1, 1), D[:1])
    assert bytes_to_move(JOB, whole, whole, ACTOR_TRAIN) == 0
    two = Placement.packed(Layout(1, 1), D[:2])
    assert bytes_to_move(JOB, whole, two, ACTOR_TRAIN) == TINY.num_params * FLOAT32.train_bytes
    assert bytes_to_move(JOB, whole, two, ACTOR_GENERATE) == TINY.num_params * 4
    assert bytes_to_move(JOB, two, whole, ACTOR_TRAIN) == 0


def test_nothing_comes_from_a_failed_device():
    before, after = Placement.packed(Layout(), D[:2]), Placement.packed(Layout(), D[1:2])
    both = JOB.on(CLUSTER.without(D[:1]))
    assert bytes_to_move(both, before, after, ACTOR_TRAIN) == 0
    back = Placement.packed(Layout(), D[:1])
    lost = bytes_to_move(both, before, back, ACTOR_TRAIN)
    assert lost == TINY.num_params * FLOAT32.train_bytes
    stages = dict.fromkeys(JOB.workload.stages, before)
    whole = plan_bytes_to_move(both, Plan(stages), Plan(dict.fromkeys(stages, back)))
    assert whole == TINY.num_params * (FLOAT32.train_bytes + 4 + 4)


def test_measured_primitives_correct_the_prediction_and_narrow_it():
    units = UnitMap([unit(0, Layout(1, 1), D[:1])])
    op = Extend(OpId("a"), (UnitId(ACTOR_TRAIN, 0),), unit(1, Layout(1, 1), D[1:2]))
    cost = CostModel(JOB)
    first = cost.primitive(op, units)
    truth = 4 * first.mean_s
    for _ in range(10):
        cost = cost.refined_transition(cost.primitive(op, units).mean_s, truth)
    last = cost.primitive(op, units)
    assert last.mean_s == pytest.approx(truth, rel=0.1)
    assert last.high_s / last.low_s < first.high_s / first.low_s
    assert cost.refined_transition(0.0, 1.0) is cost
