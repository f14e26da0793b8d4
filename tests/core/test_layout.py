import dataclasses

import pytest

from nereus_core.cluster import Cluster
from nereus_core.device_specs import H100_SXM, INFINIBAND_NDR, NVLINK4
from nereus_core.errors import LayoutError
from nereus_core.layout import (
    Layout,
    check_layout,
    layer_ranges,
    layout_problems,
    layouts,
    stage_layouts,
    stage_problems,
)
from nereus_core.model import ModelSpec
from nereus_core.plan import Placement, Plan, plan_problems
from nereus_core.sim.models import LLAMA_3_1_8B, TINY
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER, Job, grpo

SMOLLM2 = ModelSpec("smollm2", "llama", 30, 576, 1536, 9, 3, 64, 49152, tied_embeddings=True)


def test_degrees_are_never_assumed_to_be_powers_of_two():
    found = {layout.tp for layout in layouts(SMOLLM2, 9, "divisors")}
    assert found == {1, 3}  # 9 divides the heads but not intermediate=1536
    assert {layout.tp for layout in layouts(SMOLLM2, 8)} == {1}


def test_pipeline_degrees_need_not_divide_the_layers():
    assert Layout(1, 4) in layouts(SMOLLM2, 4)
    assert [len(r) for r in layer_ranges(30, 4)] == [8, 8, 7, 7]


@pytest.mark.parametrize("num_layers", [1, 4, 30, 32])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_layers_are_cut_completely_and_evenly(num_layers, pp):
    runs = layer_ranges(num_layers, pp)
    assert [i for run in runs for i in run] == list(range(num_layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_more_ranks_than_kv_heads_is_replication_only_when_it_is_a_multiple():
    assert layout_problems(TINY, Layout(4, 1)) == ()  # 2 kv heads, each on two ranks
    six = dataclasses.replace(TINY, num_heads=12, num_kv_heads=4, intermediate=132)
    assert "num_kv_heads=4" in layout_problems(six, Layout(6, 1))[0]


def test_an_impossible_layout_names_every_reason():
    with pytest.raises(LayoutError) as caught:
        check_layout(TINY, Layout(3, 9))
    assert len(caught.value.problems) == 4
    assert "pp=9 exceeds num_layers=4" in str(caught.value)


def test_layouts_fit_the_devices():
    assert all(layout.num_devices <= 16 for layout in layouts(LLAMA_3_1_8B, 16))
    assert Layout(8, 2) in layouts(LLAMA_3_1_8B, 16)


def test_text_round_trips_and_bad_text_is_refused():
    assert Layout.parse(str(Layout(4, 2))) == Layout(4, 2)
    for text in ("", "4x2", "tp4", "tpXpp1", "tp0pp1"):
        with pytest.raises(ValueError, match=r"layout|degrees"):
            Layout.parse(text)


def test_ranks_that_cut_by_rows_are_bound_by_heads_only_where_they_share_sequences():
    cluster = Cluster.homogeneous(1, 8, H100_SXM, NVLINK4, INFINIBAND_NDR)
    models = {"actor": SMOLLM2, "ref": SMOLLM2}
    job = Job(grpo(), models, cluster, 64, 128, 128, row_cut=frozenset({ACTOR_TRAIN}))
    assert stage_layouts(job, ACTOR_TRAIN, 8) == tuple(Layout(tp, 1) for tp in (1, 2, 4, 8))
    assert {layout.tp for layout in stage_layouts(job, ACTOR_GENERATE, 8)} == {1}
    assert "pp=2" in stage_problems(job, ACTOR_TRAIN, Layout(2, 2))[0]
    shared = dataclasses.replace(job, sequence_parallel=True)  # nine heads
    assert stage_layouts(shared, ACTOR_TRAIN, 8) == (Layout(1, 1),)
    assert {x.tp for x in stage_layouts(shared, ACTOR_TRAIN, 9, "divisors")} == {1, 3, 9}
    whole = Placement.packed(Layout(8, 1), cluster.devices)
    single = Placement.packed(Layout(1, 1), cluster.devices)
    plan = Plan({ACTOR_GENERATE: single, REF_INFER: single, ACTOR_TRAIN: whole})
    assert plan_problems(plan, job) == ()
    assert "does not divide num_heads=9" in plan_problems(plan, shared)[0]
