import dataclasses

import pytest

from nereus_core.cluster import Device
from nereus_core.errors import LayoutError
from nereus_core.layout import Layout
from nereus_core.sim.models import TINY
from nereus_core.state import (
    Box,
    moved_elements,
    needed_elements,
    placed,
    routes,
    tensor_rules,
    unit_shards,
)

SEATS = tuple(Device("node0", i) for i in range(8))
EMBED = "model.embed_tokens.weight"


def elements(shards):
    return sum(box.num_elements for shard in shards for box in shard.values())


def test_one_device_holds_the_whole_model():
    (shard,) = unit_shards(TINY, Layout(1, 1))
    assert elements([shard]) == TINY.num_params


def test_tied_embeddings_stand_on_both_ends_of_the_pipeline():
    shards = unit_shards(TINY, Layout(1, 3))
    assert [EMBED in shard for shard in shards] == [True, False, True]
    untied = dataclasses.replace(TINY, tied_embeddings=False)
    shards = unit_shards(untied, Layout(1, 3))
    assert [EMBED in shard for shard in shards] == [True, False, False]
    assert ["lm_head.weight" in shard for shard in shards] == [False, False, True]


def test_a_critic_has_a_value_head_and_no_lm_head():
    shards = unit_shards(TINY.as_critic("critic"), Layout(2, 2))
    assert shards[3]["score.weight"] == Box((0, 0), (1, 64))
    assert "score.weight" not in shards[0]
    assert EMBED not in shards[3]  # nothing is tied to a value head


def test_kv_heads_are_replicated_when_there_are_more_ranks():
    shards = unit_shards(TINY, Layout(4, 1))  # 2 kv heads of 16 rows each
    boxes = [s["model.layers.0.self_attn.k_proj.weight"] for s in shards]
    assert [(b.offset[0], b.shape[0]) for b in boxes] == [(0, 16), (0, 16), (16, 16), (16, 16)]


def test_an_indivisible_vocabulary_leaves_the_last_rank_fewer_rows():
    boxes = [s[EMBED] for s in unit_shards(TINY, Layout(4, 1))]  # 101 rows
    assert [b.shape[0] for b in boxes] == [26, 26, 26, 23]


def test_query_heads_stay_with_their_kv_head():
    shards = unit_shards(TINY, Layout(2, 1))
    for rank, shard in enumerate(shards):
        q = shard["model.layers.0.self_attn.q_proj.weight"]
        k = shard["model.layers.0.self_attn.k_proj.weight"]
        assert q.offset[0] // 16 // 2 == k.offset[0] // 16 == rank


def test_a_layout_the_model_does_not_allow_is_refused_before_anything_is_built():
    with pytest.raises(LayoutError, match="num_heads=4"):
        unit_shards(TINY, Layout(3, 1))


def test_extension_is_striped_over_all_intact_sources():
    before = [p for i in range(3) for p in placed(TINY, Layout(1, 1), (SEATS[i],))]
    found = routes(before, placed(TINY, Layout(1, 1), (SEATS[3],)))
    sent = {s: sum(r.box.num_elements for r in found if r.source == s) for s in SEATS[:3]}
    assert sum(sent.values()) == TINY.num_params
    assert max(sent.values()) - min(sent.values()) <= max(
        rule.shape[0] * (rule.shape[1] if len(rule.shape) > 1 else 1) for rule in tensor_rules(TINY)
    )


def test_the_nearest_source_is_taken():
    far, near, target = Device("far", 0), Device("node0", 0), Device("node0", 1)
    before = [p for d in (far, near) for p in placed(TINY, Layout(1, 1), (d,))]
    found = routes(before, placed(TINY, Layout(1, 1), (target,)))
    assert {r.source for r in found} == {near}


def test_a_tensor_held_nowhere_is_named():
    before = placed(TINY, Layout(1, 2), SEATS[:2])[:1]
    with pytest.raises(KeyError, match=r"model\.layers\.2"):
        routes(before, placed(TINY, Layout(1, 1), (SEATS[2],)))


def test_unchanged_devices_receive_nothing():
    here = placed(TINY, Layout(2, 2), SEATS[:4])
    assert moved_elements(routes(here, here)) == needed_elements(here, here) == 0
