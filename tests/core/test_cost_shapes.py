from dataclasses import replace

import numpy as np
import pytest

from nereus_core.cluster import Device
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.cost.transition import movement, shared_elements
from nereus_core.layout import Layout, layouts
from nereus_core.model import ModelSpec
from nereus_core.sim.models import LLAMA_3_1_8B, QWEN2_5_7B, TINY
from nereus_core.state import moved_elements, placed, routes, unit_shards

UNEVEN = ModelSpec("uneven", "qwen3", 7, 48, 96, 6, 3, 8, 77, qk_norm=True)
MODELS = [TINY, UNEVEN, replace(UNEVEN, tied_embeddings=True), TINY.as_critic("critic")]


@pytest.mark.parametrize("model", [*MODELS, LLAMA_3_1_8B, QWEN2_5_7B], ids=lambda m: m.name)
def test_parameters_of_the_fullest_rank_are_those_of_the_state_map(model):
    for layout in layouts(model, 8, "divisors"):
        one = np.array([1])
        options = Options.within_node(np.array([layout.tp]), np.array([layout.pp]), one)
        shards = unit_shards(model, layout)
        fullest = max(sum(box.num_elements for box in shard.values()) for shard in shards)
        assert RankShapes.of(model, options).params[0] == fullest, layout


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.name}-{m.head}-{m.tied_embeddings}")
def test_shared_elements_equal_the_intersection_of_shards(model):
    kinds = layouts(model, 6, "divisors")
    for one in kinds:
        for other in kinds:
            for i, a in enumerate(unit_shards(model, one)):
                for j, b in enumerate(unit_shards(model, other)):
                    common = sum(
                        part.num_elements
                        for name in a.keys() & b.keys()
                        if (part := a[name].intersect(b[name])) is not None
                    )
                    assert shared_elements(model, (one, i), (other, j)) == common, (one, other)


def test_movement_equals_the_routes():
    devices = tuple(Device("node0", i) for i in range(4))
    for before, after in [(Layout(4, 1), Layout(2, 2)), (Layout(1, 4), Layout(4, 1))]:
        found = routes(placed(TINY, before, devices), placed(TINY, after, devices))
        held = {d: ((before, r),) for r, d in enumerate(devices)}
        wanted = [(d, (after, r)) for r, d in enumerate(devices)]
        assert movement(TINY, held, wanted).total == moved_elements(found)
