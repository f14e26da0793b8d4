"""What the compiler writes for the changes people ask for."""

import pickle
from copy import deepcopy

import pytest
from memory_adapter import units_of
from plans import tiny_job

from nereus_core.errors import CycleError, PlanError, StateLost
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, Extend, Kind, Merge, OpId, Split, kind_of
from nereus_core.transition import (
    Edge,
    EdgeKind,
    Listed,
    TransitionGraph,
    compile_transition,
    resources,
)
from nereus_core.units import UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Stage, ppo

JOB = tiny_job(8)
D = JOB.cluster.devices


def place(layout, *indices):
    return Placement.packed(Layout(*layout), tuple(D[i] for i in indices))


def plan(**changes):
    """Train on 0-3, reference on 4-5, generation on 6-7, unless said otherwise."""
    stages = {
        "train": place((2, 1), 0, 1, 2, 3),
        "ref": place((2, 1), 4, 5),
        "generate": place((1, 1), 6, 7),
    } | changes
    names = {"train": ACTOR_TRAIN, "ref": REF_INFER, "generate": ACTOR_GENERATE}
    return Plan({names[name]: placement for name, placement in stages.items()})


def graph(before, after, **options):
    return compile_transition(units_of(before), after, JOB, prefix="t", **options)


def kinds(found):
    return [str(kind_of(op)) for op in found.ops]


def train(serial):
    return UnitId(ACTOR_TRAIN, serial)


def test_the_same_plan_needs_nothing():
    found = graph(plan(), plan())
    assert found.ops == ()
    assert found.stages == frozenset()
    assert found.units_after() == units_of(plan())
    assert found.explain() == "transition t: nothing to do"


def test_a_smaller_layout_on_the_same_devices_is_a_split():
    found = graph(plan(), plan(train=place((1, 1), 0, 1, 2, 3)))
    assert kinds(found) == ["split", "split"]
    assert all(len(op.into) == 2 for op in found.ops)


def test_a_larger_layout_on_the_same_devices_is_a_merge():
    (op,) = graph(plan(), plan(train=place((4, 1), 0, 1, 2, 3))).ops
    assert isinstance(op, Merge)
    assert op.parents == (train(0), train(1))


def test_another_layout_on_the_same_devices_is_a_split_with_one_child():
    found = graph(plan(), plan(train=place((1, 2), 0, 1, 2, 3)))
    assert [type(op) for op in found.ops] == [Split, Split]
    assert all(len(op.into) == 1 for op in found.ops)


def test_devices_in_another_order_are_a_split_with_one_child():
    (op,) = graph(plan(), plan(ref=place((2, 1), 5, 4))).ops
    assert isinstance(op, Split)
    assert op.into[0].devices == (D[5], D[4])


def test_a_unit_that_grows_onto_free_devices_is_a_merge_of_one():
    before = plan(train=place((2, 1), 0, 1))
    (op,) = graph(before, plan(train=place((4, 1), 0, 1, 2, 3))).ops
    assert isinstance(op, Merge)
    assert op.parents == (train(0),)


def test_a_missing_unit_is_striped_over_all_others():
    before = plan(train=place((1, 1), 0, 1, 2))
    (op,) = graph(before, plan(train=place((1, 1), 0, 1, 2, 3))).ops
    assert isinstance(op, Extend)
    assert op.sources == (train(0), train(1), train(2))
    assert op.unit.id == train(3)


def test_several_missing_units_share_the_sources_and_do_not_wait_for_each_other():
    before = plan(train=place((1, 1), 0, 1))
    found = graph(before, plan(train=place((1, 1), 0, 1, 2, 3)))
    assert kinds(found) == ["extend", "extend"]
    assert {op.sources for op in found.ops} == {(train(0),), (train(1),)}
    assert found.edges == ()


def test_a_surplus_unit_is_destroyed():
    (op,) = graph(plan(), plan(train=place((2, 1), 2, 3))).ops
    assert op == Destroy(OpId("t/0"), train(0))


def test_a_device_is_released_by_one_stage_before_another_acquires_it():
    found = graph(plan(), plan(train=place((2, 1), 0, 1), generate=place((1, 1), 2, 3, 6, 7)))
    destroy = next(op for op in found.ops if isinstance(op, Destroy))
    extends = [op for op in found.ops if isinstance(op, Extend)]
    assert len(extends) == 2
    released = {(e.before, e.after) for e in found.edges if e.kind is EdgeKind.RELEASE}
    assert released == {(destroy.op_id, op.op_id) for op in extends}
    assert "released by actor/train, acquired by actor/generate" in found.explain()


def test_a_stage_that_joins_one_that_stays_waits_for_nobody():
    (op,) = graph(plan(), plan(generate=place((1, 1), 0, 6, 7))).ops
    assert isinstance(op, Extend)


def test_stages_that_swap_devices_and_have_a_unit_to_spare_destroy_it_first():
    before = plan(generate=place((1, 1), 6, 7), ref=place((2, 1), 4, 5), train=place((2, 1), 0, 1))
    after = plan(generate=place((1, 1), 7, 4), ref=place((2, 1), 5, 6), train=place((2, 1), 0, 1))
    found = graph(before, after)
    first = found.ops[0]
    assert first == Destroy(OpId("t/0"), UnitId(ACTOR_GENERATE, 0))


def test_single_units_that_swap_devices_park_one_of_them():
    before = plan(generate=place((2, 1), 6, 7))
    after = plan(generate=place((2, 1), 4, 5), ref=place((2, 1), 6, 7))
    found = graph(before, after)
    assert kinds(found) == ["destroy", "extend", "destroy", "extend"]
    park, _, _, fetch = found.ops
    assert park.park
    assert fetch.sources == (park.unit,)
    assert found.parked(found.by_id) == UnitMap([found.units_before[park.unit]])
    assert not found.parked(())


def test_a_follower_that_lost_its_units_comes_from_its_train_stage():
    lost = frozenset({D[6], D[7]})
    found = graph(plan(), plan(generate=place((1, 1), 4)), lost=lost)
    (op,) = found.ops
    assert op.sources == (train(0), train(1))
    assert found.stages == {ACTOR_GENERATE, ACTOR_TRAIN}


def test_a_train_stage_that_lost_its_units_is_not_made_from_a_follower():
    units = units_of(plan(train=place((2, 1), 0, 1)))
    with pytest.raises(StateLost, match="no intact copy of actor/train"):
        compile_transition(
            units, plan(train=place((1, 1), 1)), JOB, lost=frozenset({D[0]}), prefix="t"
        )


def test_a_parked_unit_of_a_failed_transition_is_a_source():
    units = units_of(plan())
    parked = UnitMap(units.of(REF_INFER))
    left = UnitMap(u for u in units.values() if u.model_stage != REF_INFER)
    serials = {REF_INFER: 9}
    found = compile_transition(left, plan(), JOB, prefix="t", parked=parked, serials=serials)
    (op,) = found.ops
    assert op.sources == tuple(parked)
    assert op.unit.id.serial == 9


def test_a_new_unit_has_no_parked_units_name():
    units = units_of(plan())
    parked = UnitMap(units.of(REF_INFER))
    left = UnitMap(u for u in units.values() if u.model_stage != REF_INFER)
    (op,) = compile_transition(left, plan(), JOB, prefix="t", parked=parked).ops
    assert op.unit.id == UnitId(REF_INFER, 1)


def test_forbidden_splits_and_merges_become_extends_and_destroys():
    forbidden = {(kind, Stage.GENERATE) for kind in (Kind.SPLIT, Kind.MERGE)}
    found = graph(
        plan(),
        plan(generate=place((2, 1), 6, 7), train=place((4, 1), 0, 1, 2, 3)),
        forbidden=forbidden,
    )
    by_stage = {
        stage: [k for k, op in zip(kinds(found), found.ops, strict=True) if stage in str(op)]
        for stage in ("actor/generate", "actor/train")
    }
    assert sorted(by_stage["actor/generate"]) == ["destroy", "destroy", "extend"]
    assert by_stage["actor/train"] == ["merge"]


def test_units_of_several_layouts_are_brought_into_line():
    small = units_of(plan(train=place((1, 1), 0, 1))).of(ACTOR_TRAIN)
    large = units_of(plan()).of(ACTOR_TRAIN)[1:]
    others = [u for u in units_of(plan()).values() if u.model_stage != ACTOR_TRAIN]
    mixed = UnitMap([small[0], *large, *others])
    found = compile_transition(mixed, plan(), JOB, prefix="t")
    assert kinds(found) == ["merge"]
    after = Plan.of_units(found.units_after())[ACTOR_TRAIN]
    assert after.layout == Layout(2, 1)
    assert set(after.units) == set(plan()[ACTOR_TRAIN].units)


def test_a_plan_on_a_lost_device_is_refused():
    with pytest.raises(PlanError, match="node0:1 is not healthy"):
        graph(plan(), plan(), lost=frozenset({D[1]}))


def test_ppo_critic_infer_follows_its_own_train_stage():
    job = tiny_job(4, ppo())
    stages = {
        s: Placement.packed(Layout(1, 1), job.cluster.devices[:2]) for s in job.workload.stages
    }
    units = units_of(Plan(stages))
    gone = UnitMap(u for u in units.values() if str(u.model_stage) != "critic/infer")
    found = compile_transition(gone, Plan(stages), job, prefix="t")
    assert {str(s.model_stage) for op in found.ops for s in op.sources} == {"critic/train"}


def test_a_cycle_is_spelled_out():
    ops = (Destroy(OpId("a"), train(0)), Destroy(OpId("b"), train(1)))
    edges = tuple(
        Edge(OpId(x), OpId(y), EdgeKind.ORDER, "by hand") for x, y in (("a", "b"), ("b", "a"))
    )
    with pytest.raises(CycleError, match=r"a -> b -> a|b -> a -> b"):
        TransitionGraph("t", units_of(plan()), Listed(ops, edges))


def test_a_graph_is_in_order_before_anything_of_it_is_read():
    found = graph(plan(), plan(train=place((2, 1), 0, 1), generate=place((1, 1), 2, 6, 7)))
    assert list(found.steps.pairs()) == [(0, 1)]
    assert [(e.before, e.after) for e in found.edges] == [("t/0", "t/1")]
    assert found.ops is found.ops  # values are made once
    assert found == TransitionGraph("t", found.units_before, Listed(found.ops, found.edges))


def test_an_order_that_breaks_an_edge_is_no_graph(monkeypatch):
    changes = {"train": place((2, 1), 0, 1), "generate": place((1, 1), 2, 6, 7)}
    monkeypatch.setattr(resources, "soonest", lambda draft, found, *rest: found[::-1])
    with pytest.raises(IndexError):
        graph(plan(), plan(**changes))


def test_a_graph_is_equal_whichever_way_it_was_read_or_copied():
    def made():
        after = plan(train=place((2, 1), 0, 1), generate=place((1, 1), 2, 6, 7))
        return graph(plan(), after)

    unread, read = pickle.loads(pickle.dumps(made())), made()
    assert read.edges  # before the primitives
    assert unread == deepcopy(read) == read
    assert hash(unread) == hash(read)
    assert read != "t"
    assert "object at" not in repr(read)


def test_units_in_lists_of_colocated_stages_are_told_apart():
    """Stages that lie and go alike are matched once; each has its own units all the same."""
    alike = place((2, 1), 4, 5)
    halves = place((1, 1), 4, 5)
    found = graph(plan(ref=alike, generate=alike), plan(ref=halves, generate=halves))
    assert kinds(found) == ["split", "split"]
    assert [str(op.parent) for op in found.ops] == ["actor/generate#0", "ref/infer#0"]
    assert [str(u.id) for op in found.ops for u in op.into] == [
        *("actor/generate#1", "actor/generate#2"),
        *("ref/infer#1", "ref/infer#2"),
    ]


@pytest.mark.parametrize("order", [(4, 5, 6, 7), (6, 7, 4, 5), (4, 6, 5, 7), (7, 6, 5, 4)])
def test_a_unit_is_cut_into_places_in_whatever_order_its_devices_are(order):
    before = plan(train=place((4, 1), *order), ref=place((1, 1), 0), generate=place((1, 1), 1))
    after = plan(train=place((2, 1), 4, 5, 6, 7), ref=place((1, 1), 0), generate=place((1, 1), 1))
    (op,) = graph(before, after).ops
    assert isinstance(op, Split)
    first = order[0] // 2 * 2
    assert [u.devices for u in op.into] == [
        (D[first], D[first + 1]),
        *[(D[i], D[i + 1]) for i in (4, 6) if i != first],
    ]


def test_explain_names_every_primitive_and_what_it_waits_for():
    found = graph(plan(), plan(train=place((2, 1), 0, 1), generate=place((1, 1), 2, 6, 7)))
    text = found.explain().splitlines()
    assert text[0] == "transition t: 2 primitives, edges: 1"
    assert text[1].strip() == "t/0  destroy actor/train#1"
    assert text[3].strip().startswith("after t/0 (release): node0:2 released by actor/train")


def test_json_carries_nodes_and_edges():
    found = graph(plan(), plan(train=place((2, 1), 0, 1), generate=place((1, 1), 2, 6, 7)))
    ops, edges = found.to_json()
    assert [op["op_id"] for op in ops] == ["t/0", "t/1"]
    assert ops[1]["devices"] == ["node0:2", "node1:2", "node1:3"]
    assert edges[0]["kind"] == "release"
