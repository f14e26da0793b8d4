import math
import random

import pytest

from nereus_core.cluster import Cluster
from nereus_core.cost import CostModel
from nereus_core.cost.op_classes import INDEX, OpClass
from nereus_core.cost.transition import bytes_to_move, plan_bytes_to_move, primitive_work
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


def test_what_is_parked_crosses_to_the_host_and_back():
    units = UnitMap([unit(0, Layout(2, 1), D[:2]), unit(1, Layout(2, 1), D[4:6])])
    park = Destroy(OpId("a"), UnitId(ACTOR_TRAIN, 1), park=True)
    back = Extend(OpId("b"), (UnitId(ACTOR_TRAIN, 1),), unit(2, Layout(2, 1), D[4:6]))
    staged = Merge(OpId("c"), (UnitId(ACTOR_TRAIN, 0),), unit(3, Layout(1, 2), D[:2]), 0)
    parked = {UnitId(ACTOR_TRAIN, 1)}
    shard_bytes = TINY.num_params * FLOAT32.train_bytes / 2
    host_s = {
        op.op_id: primitive_work(JOB, op, units, parked)[INDEX[OpClass.HOST]]
        for op in (park, back, staged)
    }
    once_s = shard_bytes / CPU_SEAT.host_bytes_per_s
    assert host_s["a"] == pytest.approx(once_s, rel=0.05)
    assert host_s["b"] == pytest.approx(once_s, rel=0.05)
    # A rank of tp2 holds half of every layer, one of pp2 half of the layers: it lacks a half.
    assert host_s["c"] == pytest.approx(2 * once_s / 2, rel=0.15)
    alive = Extend(OpId("d"), (UnitId(ACTOR_TRAIN, 0),), unit(2, Layout(2, 1), D[4:6]))
    assert not primitive_work(JOB, alive, units, parked)[INDEX[OpClass.HOST]]


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


def extension(to: Layout, stage=ACTOR_TRAIN) -> tuple[Extend, UnitMap]:
    units = UnitMap([unit(0, Layout(1, 1), D[:1], stage)])
    made = unit(1, to, D[1 : 1 + to.num_devices], stage)
    return Extend(OpId("a"), (UnitId(stage, 0),), made), units


def width(interval) -> float:
    return interval.high_s / interval.low_s


def test_measured_transitions_correct_the_prediction():
    op, units = extension(Layout(1, 1))
    cost = CostModel(JOB)
    truth = 4 * cost.primitive(op, units).mean_s
    for _ in range(10):
        cost = cost.refined_transition([op], units, truth)
    assert cost.primitive(op, units).mean_s == pytest.approx(truth, rel=0.05)
    assert cost.refined_transition([], units, 1.0) is cost
    for nonsense in (0.0, -3.0, math.nan, math.inf):
        assert cost.refined_transition([op], units, nonsense) is cost


def test_intervals_of_transitions_narrow_to_how_much_they_scatter():
    op, units = extension(Layout(1, 1))
    cost, noise = CostModel(JOB), random.Random(0)
    truth = 3 * cost.primitive(op, units).mean_s
    widths = [width(cost.primitive(op, units))]
    for _ in range(20):
        cost = cost.refined_transition([op], units, truth * math.exp(noise.gauss(0, 0.05)))
        widths.append(width(cost.primitive(op, units)))
    assert widths[0] > 8
    assert widths[3] < 3.5
    assert widths[20] < 1.35  # 90% of a 5% scatter: exp(2 x 1.28 x 0.05) = 1.14
    assert widths[20] > 1.1


def test_transitions_that_scatter_keep_wide_intervals():
    op, units = extension(Layout(1, 1))
    noise = random.Random(1)
    cost, held = CostModel(JOB), 0
    truth = 3 * cost.primitive(op, units).mean_s
    for number in range(200):
        measured = truth * math.exp(noise.gauss(0, 0.5))
        predicted = cost.primitive(op, units)
        held += number >= 100 and predicted.low_s <= measured <= predicted.high_s
        cost = cost.refined_transition([op], units, measured)
    assert 70 <= held <= 90  # of 100: two bounds that hold with 90% each
    assert width(cost.primitive(op, units)) > 2.5


def test_transitions_of_different_mixes_tell_calls_from_bytes():
    small, large = extension(Layout(1, 1), ACTOR_GENERATE), extension(Layout(1, 1))
    fixed_s, moved = 0.5, 50.0  # calls take longer than assumed, and bytes much longer

    def truth(op, units) -> float:
        work = primitive_work(JOB, op, units)
        return fixed_s + moved * float(work[INDEX[OpClass.P2P_INTRA]])

    cost = CostModel(JOB)
    for _ in range(12):
        for op, units in (small, large):
            cost = cost.refined_transition([op], units, truth(op, units))
    between = extension(Layout(2, 1))
    assert cost.primitive(*between).mean_s == pytest.approx(truth(*between), rel=0.2)


def test_one_transition_corrects_those_of_other_mixes():
    small, large = extension(Layout(1, 1), ACTOR_GENERATE), extension(Layout(1, 1))
    cost = CostModel(JOB)
    taught = cost.refined_transition([small[0]], small[1], 5 * cost.primitive(*small).mean_s)
    assert taught.primitive(*large).mean_s > 1.5 * cost.primitive(*large).mean_s
    assert width(taught.primitive(*large)) < width(cost.primitive(*large))
