import pytest

from nereus_core.cluster import Device
from nereus_core.errors import DevicesBusy, Infeasible, LastUnit, NoSuchUnit, PrimitiveError
from nereus_core.layout import Layout
from nereus_core.primitives import (
    Destroy,
    Extend,
    Kind,
    Merge,
    OpId,
    Split,
    acquired,
    apply,
    kind_of,
    released,
    touched,
)
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

D = tuple(Device("node0", i) for i in range(8))
OP = OpId("op")


def unit(serial, layout, devices, stage=ACTOR_TRAIN):
    return Unit(UnitId(stage, serial), layout, tuple(devices))


WIDE = unit(0, Layout(2, 1), D[:2])
TWO = UnitMap([unit(0, Layout(1, 1), D[:1]), unit(1, Layout(1, 1), D[1:2])])


def test_split_and_merge_are_inverse():
    split = Split(OP, WIDE.id, (unit(1, Layout(1, 1), D[:1]), unit(2, Layout(1, 1), D[1:2])))
    after = apply(split, UnitMap([WIDE]))
    assert [str(u) for u in after] == ["actor/train#1", "actor/train#2"]
    back = apply(Merge(OP, tuple(after), unit(3, Layout(2, 1), D[:2])), after)
    (one,) = back.values()
    assert (one.layout, one.devices) == (WIDE.layout, WIDE.devices)


def test_split_with_one_child_shrinks_and_releases():
    op = Split(OP, WIDE.id, (unit(1, Layout(1, 1), D[:1]),))
    assert released(op, UnitMap([WIDE])) == {D[1]}
    assert acquired(op, UnitMap([WIDE])) == frozenset()
    assert len(apply(op, UnitMap([WIDE]))) == 1


def test_merge_with_one_parent_grows_and_acquires():
    op = Merge(OP, (WIDE.id,), unit(1, Layout(4, 1), D[:4]))
    assert acquired(op, UnitMap([WIDE])) == {D[2], D[3]}
    assert kind_of(op) is Kind.MERGE


def test_extend_touches_its_sources():
    op = Extend(OP, (UnitId(ACTOR_TRAIN, 0),), unit(2, Layout(1, 1), D[2:3]))
    assert touched(op, TWO) == {D[0], D[2]}
    assert len(apply(op, TWO)) == 3


def test_a_follower_may_be_extended_from_its_train_stage():
    op = Extend(OP, (UnitId(ACTOR_TRAIN, 0),), unit(0, Layout(1, 1), D[:1], ACTOR_GENERATE))
    assert len(apply(op, TWO).of(ACTOR_GENERATE)) == 1


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (Destroy(OP, UnitId(ACTOR_TRAIN, 9)), NoSuchUnit),
        (Extend(OP, (), unit(2, Layout(1, 1), D[2:3])), PrimitiveError),
        (Extend(OP, (UnitId(ACTOR_TRAIN, 0),), unit(2, Layout(1, 1), D[1:2])), DevicesBusy),
        (Extend(OP, (UnitId(ACTOR_TRAIN, 0),), unit(1, Layout(1, 1), D[2:3])), PrimitiveError),
        (
            Extend(OP, (UnitId(ACTOR_TRAIN, 0),), unit(0, Layout(1, 1), D[2:3], REF_INFER)),
            PrimitiveError,
        ),
        (Split(OP, UnitId(ACTOR_TRAIN, 0), (unit(2, Layout(1, 1), D[3:4]),)), Infeasible),
        (Split(OP, UnitId(ACTOR_TRAIN, 0), ()), Infeasible),
        (Merge(OP, tuple(TWO), unit(2, Layout(4, 1), D[:4])), Infeasible),
        (Merge(OP, (next(iter(TWO)),) * 2, unit(2, Layout(1, 1), D[:1])), PrimitiveError),
        (Merge(OP, tuple(TWO), unit(2, Layout(2, 1), D[:2], REF_INFER)), PrimitiveError),
    ],
)
def test_a_broken_precondition_has_its_error(op, error):
    with pytest.raises(error):
        apply(op, TWO)


def test_the_last_unit_of_a_stage_ends_only_parked():
    alone = UnitMap([WIDE])
    with pytest.raises(LastUnit, match="actor/train#0"):
        apply(Destroy(OP, WIDE.id), alone)
    assert len(apply(Destroy(OP, WIDE.id, park=True), alone)) == 0


def test_units_are_checked_when_made():
    with pytest.raises(ValueError, match="takes 2 devices, got 1"):
        unit(0, Layout(2, 1), D[:1])
    with pytest.raises(ValueError, match="listed twice"):
        unit(0, Layout(2, 1), (D[0], D[0]))
    with pytest.raises(ValueError, match="one id"):
        UnitMap([WIDE, WIDE])


def test_loss_of_a_device_leaves_the_intact_units():
    assert list(TWO.intact([D[1]])) == [UnitId(ACTOR_TRAIN, 0)]
    assert UnitId.parse("actor/train#0") == UnitId(ACTOR_TRAIN, 0)
