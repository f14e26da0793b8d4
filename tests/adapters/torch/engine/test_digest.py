"""Digests add up over any cut and notice what a layout change may break."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_adapters.torch.engine.digest import combine, digest_box
from nereus_core.errors import Diverged
from nereus_core.state import Box

pytestmark = pytest.mark.real


def whole(shape, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(dtype), Box((0,) * len(shape), shape)


def total(parts):
    return combine([{"param/w": part} for part in parts])["param/w"]


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(2, 300),
    columns=st.integers(2, 300),
    where=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_boxes_add_up_to_the_tensor(rows, columns, where, dtype):
    values, box = whole((rows, columns), dtype)
    r, c = 1 + int(where[0] * (rows - 2)), 1 + int(where[1] * (columns - 2))
    parts = [
        digest_box(values[a:b, x:y], Box((a, x), (b - a, y - x)))
        for a, b in ((0, r), (r, rows))
        for x, y in ((0, c), (c, columns))
    ]
    assert total(parts) == digest_box(values, box)


def test_vectors_add_up_too():
    values, box = whole((37,))
    parts = [digest_box(values[a:b], Box((a,), (b - a,))) for a, b in ((0, 9), (9, 37))]
    assert total(parts) == digest_box(values, box)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_change_shows(dtype):
    values, box = whole((64, 48), dtype)
    clean = digest_box(values, box)
    changed = {"all signs": -values, "zeroed": torch.zeros_like(values)}
    changed["rows in each other's place"] = values.roll(1, 0)
    changed["columns in each other's place"] = values.roll(1, 1)
    changed["two signs"] = values.clone()
    changed["two signs"][3, 4:6] *= -1
    changed["two elements swapped"] = values.clone()
    changed["two elements swapped"][[0, 63], [0, 47]] = values[[63, 0], [47, 0]]
    found = {name: digest_box(other, box) for name, other in changed.items()}
    assert clean not in found.values()
    assert len(set(found.values())) == len(found)


def test_a_part_under_another_box_shows():
    values, _ = whole((8, 8))
    low, high = Box((0, 0), (8, 8)), Box((8, 0), (8, 8))
    assert digest_box(values, low) != digest_box(values, high)


def test_a_copy_that_differs_is_named():
    with pytest.raises(Diverged, match=r"rank 0, rank 1 differ in param/k"):
        combine([{"param/k": "0" * 32}, {"param/k@0": "1" * 32}])
    assert combine([{"param/k": "0" * 32}, {"param/k@0": "0" * 32}]) == {"param/k": "0" * 32}
