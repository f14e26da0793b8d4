"""Routes carry exactly the right bytes, exactly once, for random models, layouts and devices."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_core.cluster import Device
from nereus_core.layout import Layout, layouts
from nereus_core.model import ModelSpec
from nereus_core.state import Box, moved_elements, needed_elements, placed, routes, tensor_rules

SEATS = tuple(Device(f"node{i // 4}", i % 4) for i in range(8))


@st.composite
def models(draw):
    kv = draw(st.sampled_from([1, 2, 3]))
    heads = kv * draw(st.sampled_from([1, 2, 4]))
    return ModelSpec(
        "random",
        "llama",
        num_layers=draw(st.integers(1, 5)),
        hidden=4,
        intermediate=draw(st.sampled_from([12, 24])),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=2,
        vocab=draw(st.integers(11, 17)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        head=draw(st.sampled_from(["lm", "value"])),
    )


@st.composite
def unit_sets(draw, model):
    layout = draw(st.sampled_from(layouts(model, 4, "divisors")))
    dp = draw(st.integers(1, 8 // layout.num_devices))
    devices = draw(st.permutations(SEATS))[: dp * layout.num_devices]
    n = layout.num_devices
    return [
        pair
        for u in range(dp)
        for pair in placed(model, layout, tuple(devices[u * n : (u + 1) * n]))
    ]


@st.composite
def changes(draw):
    model = draw(models())
    return model, draw(unit_sets(model)), draw(unit_sets(model))


def whole(model):
    return {
        r.name: np.arange(1, np.prod(r.shape) + 1).reshape(r.shape) for r in tensor_rules(model)
    }


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))


@given(changes())
@settings(max_examples=60, deadline=None)
def test_routes_rebuild_every_shard_and_move_the_lower_bound(change):
    model, before, after = change
    logical = whole(model)
    held = {(d, n): (b, logical[n][at(b)].copy()) for d, s in before for n, b in s.items()}
    wanted = {(d, n): (b, np.zeros(b.shape, dtype=int)) for d, s in after for n, b in s.items()}
    for route in routes(before, after):
        source_box, source = held[route.source, route.tensor]
        target_box, target = wanted[route.target, route.tensor]
        part = target[route.box.within(target_box)]
        assert not part.any(), "a byte arrives twice"
        part[...] = source[route.box.within(source_box)]
    for (_, name), (box, values) in wanted.items():
        assert np.array_equal(values, logical[name][at(box)])
    assert moved_elements(routes(before, after)) == needed_elements(before, after)


@given(changes())
@settings(max_examples=30, deadline=None)
def test_the_lower_bound_agrees_with_counting_elements_one_by_one(change):
    model, before, after = change
    logical = whole(model)
    has: dict = {}
    for device, shard in before:
        for name, box in shard.items():
            has.setdefault((device, name), set()).update(logical[name][at(box)].flat)
    count = sum(
        len(set(logical[name][at(box)].flat) - has.get((device, name), set()))
        for device, shard in after
        for name, box in shard.items()
    )
    assert count == needed_elements(before, after)


@given(changes())
@settings(max_examples=30, deadline=None)
def test_layouts_cover_the_model(change):
    model, before, _ = change
    logical = whole(model)
    for rule in tensor_rules(model):
        covered = {
            v
            for _, s in before
            if rule.name in s
            for v in logical[rule.name][at(s[rule.name])].flat
        }
        assert len(covered) == logical[rule.name].size


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_box_minus_and_intersection_partition_a_box(data):
    def box():
        offset = data.draw(st.tuples(*[st.integers(0, 3)] * 2))
        return Box(offset, data.draw(st.tuples(*[st.integers(1, 4)] * 2)))

    one, other = box(), box()
    common = one.intersect(other)
    pieces = (common, *one.minus(common)) if common else (one,)
    grid = np.zeros((8, 8), dtype=int)
    for piece in pieces:
        grid[at(piece)] += 1
    assert grid[at(one)].min() == grid.max() == 1
    assert grid.sum() == one.num_elements


def test_every_layout_of_smollm2_is_a_divisor_not_a_power_of_two():
    model = ModelSpec("smollm2", "llama", 30, 576, 1536, 9, 3, 64, 49152, tied_embeddings=True)
    assert [y.tp for y in layouts(model, 3, "divisors") if y.pp == 1] == [1, 3]
    assert Layout(3, 1) not in layouts(model, 3)
