"""Buckets carry every crossing element once, bounded, in an order without cycles of waits."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_adapters.torch.exchange import digest, packed
from nereus_adapters.torch.routing import buckets, pieces, ranks
from nereus_adapters.torch.values import Bucket
from nereus_core.cluster import Device
from nereus_core.layout import layouts
from nereus_core.sim.models import TINY
from nereus_core.state import Box, Slot, moved_elements, placed, routes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.real

SEATS = tuple(Device("node0", i) for i in range(4))
LAYOUTS = layouts(TINY, 4)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    limit=st.integers(1, 50),
)
@settings(max_examples=200, deadline=None)
def test_pieces_cover_a_box_once_and_are_bounded(shape, limit):
    offset = tuple(range(len(shape)))
    covered = Counter()
    for piece in pieces(Box(offset, shape), limit):
        assert piece.num_elements <= limit
        covered.update(_cells(piece))
    assert covered == Counter(_cells(Box(offset, shape)))


def _cells(box):
    cells = [()]
    for start, count in zip(box.offset, box.shape, strict=True):
        cells = [(*c, i) for c in cells for i in range(start, start + count)]
    return cells


@given(
    before=st.sampled_from(LAYOUTS),
    after=st.sampled_from(LAYOUTS),
    order=st.permutations(SEATS),
    limit=st.sampled_from([64, 1000, 10**6]),
)
@settings(max_examples=40, deadline=None)
def test_buckets_carry_what_crosses_once_per_slot(before, after, order, limit):
    held = placed(TINY, before, SEATS[: before.num_devices])
    wanted = placed(TINY, after, tuple(order[: after.num_devices]))
    found = routes(held, wanted)
    numbering = ranks(found)
    messages = buckets(found, {Slot.PARAM: 8, Slot.EXP_AVG: 4}, numbering, limit)
    for slot, each in ((Slot.PARAM, 8), (Slot.EXP_AVG, 4)):
        mine = [m for m in messages if m.slot is slot]
        sizes = [sum(b.num_elements for _, b in m.regions) for m in mine]
        assert sum(sizes) == moved_elements(found)
        assert all(each * size <= limit for size in sizes)
    assert all(m.source != m.target for m in messages)


def test_a_digest_sees_a_changed_bit_and_swapped_elements():
    values = torch.arange(1000, dtype=torch.float32)
    changed, swapped = values.clone(), values.clone()
    changed.view(torch.int32)[500] ^= 1
    swapped[[3, 4]] = swapped[[4, 3]]
    assert not torch.equal(digest(values), digest(changed))
    assert not torch.equal(digest(values), digest(swapped))
    assert torch.equal(digest(values), digest(values.clone()))


def test_one_contiguous_region_is_sent_from_where_it_lies():
    whole = torch.arange(24.0).view(4, 6)

    def read(slot, name, box):
        return whole[box.within(Box((0, 0), (4, 6)))]

    rows = Bucket(0, 1, Slot.PARAM, (("w", Box((1, 0), (2, 6))),))
    assert packed(rows, read).data_ptr() == whole[1].data_ptr()
    columns = Bucket(0, 1, Slot.PARAM, (("w", Box((0, 1), (4, 2))), ("w", Box((0, 0), (1, 1)))))
    assert packed(columns, read).tolist() == [1, 2, 7, 8, 13, 14, 19, 20, 0]
