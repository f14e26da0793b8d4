import pickle
from dataclasses import replace

import pytest

from nereus_core.cluster import Cluster, Device
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import PlanError
from nereus_core.layout import Layout, stage_layouts
from nereus_core.plan import Placement, Plan, check_plan, diff, plan_problems
from nereus_core.sim.models import TINY
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, ModelStage, grpo

CLUSTER = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
D = CLUSTER.devices
JOB = Job(grpo(), {"actor": TINY, "ref": TINY}, CLUSTER, 8, 16, 16)


def plan(**changes):
    placements = {
        ACTOR_GENERATE: Placement.packed(Layout(1, 1), D),
        ACTOR_TRAIN: Placement.packed(Layout(2, 1), D),
        REF_INFER: Placement.packed(Layout(1, 1), D[:2]),
    }
    return Plan(placements | {ModelStage.parse(k.replace("_", "/")): v for k, v in changes.items()})


def test_a_good_plan_has_no_problems_and_reads_in_one_line():
    check_plan(plan(), JOB)
    assert str(plan()) == "actor/generate=tp1pp1dp4 actor/train=tp2pp1dp2 ref/infer=tp1pp1dp2"


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        (Placement(Layout(3, 1), (D[:3],)), "tp=3 does not divide num_heads=4"),
        (Placement(Layout(1, 1), ((D[0],), (D[1],), (D[2],))), "dp=3 does not divide batch 8"),
        (Placement(Layout(1, 1), ((D[0],), (D[0],))), "a device is in two units"),
        (Placement(Layout(1, 1), ((Device("node9", 0),),)), "node9:0 is not healthy"),
        (Placement(Layout(2, 1), ((D[0],),)), "a unit has not 2 devices"),
        (Placement(Layout(1, 1), ()), "has no unit"),
    ],
)
def test_every_rule_names_what_breaks_it(placement, problem):
    problems = plan_problems(plan(ref_infer=placement), JOB)
    assert any(problem in p for p in problems), problems


def test_missing_and_foreign_stages_are_named():
    placements = dict(plan())
    del placements[REF_INFER]
    with pytest.raises(PlanError, match="ref/infer has no placement"):
        check_plan(Plan(placements), JOB)
    with pytest.raises(PlanError, match="critic/train is not part of grpo"):
        check_plan(plan(critic_train=Placement.packed(Layout(1, 1), D)), JOB)


def test_failed_devices_make_a_plan_invalid():
    with pytest.raises(PlanError, match="node0:3 is not healthy"):
        check_plan(plan(), JOB.on(CLUSTER.without([D[3]])))


def test_diff_lists_only_what_changed():
    other = plan(actor_train=Placement.packed(Layout(1, 2), D))
    (change,) = diff(plan(), other)
    assert str(change) == "actor/train: tp2pp1dp2 -> tp1pp2dp2 (+0 -0 devices)"
    assert diff(plan(), plan()) == ()


def test_json_round_trips_and_malformed_json_is_refused():
    assert Plan.from_json(plan().to_json()) == plan()
    assert pickle.loads(pickle.dumps(plan())) == plan()  # to other processes, too
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json({"actor/train": {"layout": "tp2"}})
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json({"actor/train": {"layout": "tp1pp1"}})


def test_a_plan_is_read_from_units():
    units = UnitMap(
        Unit(UnitId(stage, i), placement.layout, devices)
        for stage, placement in plan().items()
        for i, devices in enumerate(placement.units)
    )
    assert Plan.of_units(units) == plan()


def test_devices_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match="3 devices do not divide"):
        Placement.packed(Layout(2, 1), D[:3])


def test_units_that_cut_key_value_heads_take_no_more_ranks_than_there_are():
    assert TINY.num_kv_heads == 2
    both = {
        "actor_train": Placement.packed(Layout(4, 1), D),
        "actor_generate": Placement.packed(Layout(4, 1), D),
    }
    assert plan_problems(plan(**both), JOB) == ()
    cut = replace(JOB, kv_heads_cut=frozenset({ACTOR_TRAIN}))
    assert plan_problems(plan(**both), cut) == ("actor/train: tp=4 does not divide num_kv_heads=2",)


def test_units_have_no_more_pipeline_stages_than_a_framework_gives_them():
    two = Placement.packed(Layout(1, 2), D)
    assert plan_problems(plan(actor_train=two, actor_generate=two), JOB) == ()
    most = replace(JOB, most_stages={ACTOR_TRAIN: 2, ACTOR_GENERATE: 1})
    assert plan_problems(plan(actor_train=two, actor_generate=two), most) == (
        "actor/generate: pp=2 exceeds the 1 pipeline stages that it may have",
    )
    assert {layout.pp for layout in stage_layouts(most, ACTOR_TRAIN, 4)} == {1, 2}
    assert {layout.pp for layout in stage_layouts(most, ACTOR_GENERATE, 4)} == {1}


def test_units_share_out_whole_micro_batches():
    fewer = replace(JOB, unit_batch=2)
    four = Placement.packed(Layout(1, 1), D)
    assert plan_problems(plan(actor_train=four), fewer) == (
        "actor/train: 4 units do not divide 2 sequences",
    )
    assert plan_problems(plan(actor_generate=four), fewer) == ()
