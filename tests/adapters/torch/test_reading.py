"""State is read out of another process's memory, whole and nothing else, or a named error comes."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
xxhash = pytest.importorskip("xxhash")

from nereus_adapters.torch import move, reading  # noqa: E402
from nereus_adapters.torch.engine import PeerLost  # noqa: E402
from nereus_adapters.torch.exchange import Garbled  # noqa: E402
from nereus_adapters.torch.reading import (  # noqa: E402
    CHUNK_BYTES,
    Unreadable,
    Window,
    digest,
    fetch,
    own_window,
    spot,
)
from nereus_adapters.torch.values import Bucket, Offer  # noqa: E402
from nereus_adapters.torch.ways import turned, ways  # noqa: E402
from nereus_core.cluster import Device  # noqa: E402
from nereus_core.errors import UnitLost  # noqa: E402
from nereus_core.layout import Layout  # noqa: E402
from nereus_core.state import Box, Slot  # noqa: E402
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN  # noqa: E402

pytestmark = pytest.mark.real

OTHER = """
import sys, torch
from nereus_adapters.torch.reading import own_window, spot
whole = torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000)
window = own_window()
print(repr((window.host, window.pid, window.token_at, window.token, spot(whole))), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other():
    """Another process that holds arange(3e6) as [1500, 2000]."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    host, pid, token_at, token, where = eval(process.stdout.readline())
    yield process, Window(host, pid, token_at, token), where
    process.kill()
    process.communicate()


def test_regions_of_another_process_arrive_whole(other):
    _, window, (address, strides) = other
    assert window.host == own_window().host
    window.check()
    whole = torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000)
    assert whole.nbytes > 2 * CHUNK_BYTES
    for rows, columns in (
        (slice(0, 1500), slice(0, 2000)),
        (slice(7, 11), slice(0, 2000)),
        (slice(0, 1500), slice(3, 5)),
    ):
        at = address + rows.start * strides[0] + columns.start * strides[1]
        into, left, came = torch.empty_like(whole[rows, columns].contiguous()), *_digests(2)
        fetch(window, [((at, strides), into)], came)
        digest(whole[rows, columns], left)
        assert torch.equal(into, whole[rows, columns])
        assert came.digest() == left.digest()


@st.composite
def _cuts(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return shape, tuple(slice(s, draw(st.integers(s + 1, n))) for s, n in zip(starts, shape))  # noqa: B905


@given(
    cuts=st.lists(st.tuples(_cuts(), st.integers(0, 2)), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    chunk=st.sampled_from([16, 64, CHUNK_BYTES]),
)
@settings(max_examples=200, deadline=None)
def test_any_regions_arrive_in_any_place_and_nothing_beside_them(cuts, dtype, chunk):
    """From strided to strided storage and whole to whole, mixed; of this process: the same call."""
    draw = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=draw).to(dtype)[where] for (shape, where), _ in cuts]
    wide = [
        torch.zeros([n + room for n in part.shape], dtype=dtype)
        for part, (_, room) in zip(parts, cuts, strict=True)
    ]
    into = [w[tuple(slice(0, n) for n in p.shape)] for w, p in zip(wide, parts, strict=True)]
    left, came = _digests(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK_BYTES", chunk)
        fetch(own_window(), zip(map(spot, parts), into, strict=True), came)
    for part, there, whole in zip(parts, into, wide, strict=True):
        digest(part, left)
        assert torch.equal(there, part)
        assert int(whole.count_nonzero()) == int(part.count_nonzero())
    assert came.digest() == left.digest()


def test_more_regions_arrive_than_one_system_call_takes():
    parts = torch.arange(5000.0).split(2)
    into = torch.zeros(5000).split(2)
    left, came = _digests(2)
    fetch(own_window(), zip(map(spot, parts), into, strict=True), came)
    for part, there in zip(parts, into, strict=True):
        digest(part, left)
        assert torch.equal(there, part)
    assert came.digest() == left.digest()


def test_a_changed_bit_changes_the_digest():
    values, changed = torch.arange(100.0), torch.arange(100.0)
    changed.view(torch.int32)[50] ^= 1
    one, other = _digests(2)
    digest(values, one)
    digest(changed, other)
    assert one.digest() != other.digest()


def test_a_process_that_is_gone_is_named(other):
    process, window, where = other
    process.kill()
    process.wait()
    with pytest.raises(PeerLost, match=f"process {window.pid}: No such process"):
        fetch(window, [(where, torch.empty(1500, 2000))], *_digests(1))
    with pytest.raises(Unreadable, match="No such process"):
        window.check()


def test_memory_that_is_gone_is_an_error(other):
    _, window, (_, strides) = other
    with pytest.raises(PeerLost, match="Bad address"):
        fetch(window, [((8, strides), torch.empty(1500, 2000))], *_digests(1))


def test_another_process_under_the_same_id_is_noticed(other):
    _, window, _ = other
    with pytest.raises(Unreadable, match="another process"):
        replace(window, token=b"0" * 16).check()


# --- Which way state goes ---------------------------------------------------------------------

NEAR, FAR = Device("node0", 0), Device("node1", 0)
MESSAGES = [Bucket(0, 1, Slot.PARAM, (("w", Box((0,), (4,))),))]


def _offer(host):
    window = None if host is None else Window(host, 1, 2, b"")
    return Offer(window, {1: ((100, (4,)),)})


def _chosen(hosts, **options):
    offers = dict(zip((NEAR, FAR), map(_offer, hosts), strict=True))
    return ways(offers, {NEAR: 0, FAR: 1}, MESSAGES, "g", 1.0, **{"may_read": True, **options})


def test_a_seat_reads_from_one_on_its_host():
    found = _chosen(["here", "here"])
    assert found[FAR].arrivals[0].spots == ((100, (4,)),)
    assert found[NEAR].readers == {1}
    assert found[NEAR].meeting is found[FAR].meeting is None


@pytest.mark.parametrize(
    ("hosts", "options"),
    [(("here", "there"), {}), (("here", None), {}), (("here", "here"), {"may_read": False})],
)
def test_others_meet_in_a_group(hosts, options):
    found = _chosen(hosts, **options)
    assert not found[FAR].arrivals
    assert not found[NEAR].readers
    assert (found[NEAR].meeting.rank, found[FAR].meeting.rank) == (0, 1)


def test_digests_are_told_to_those_who_read():
    assert turned({NEAR: {1: (7, 8)}, FAR: {}}, {NEAR: 0, FAR: 1}) == {NEAR: {}, FAR: {0: (7, 8)}}


def test_state_takes_the_group_where_memory_cannot_be_read(harness, tools, monkeypatch):
    """The seats look for one another's token in a process that does not have it: the driver."""
    adapter = harness.launch(harness.job(), tools.packed(harness.job()))
    fleet, hand = harness.running_job.fleet, tools.Hand(adapter)
    harness.step()
    before = tools.sha256(harness.peek(hand.ids(ACTOR_TRAIN)[0]))

    def astray(offers, *args, **kwargs):
        moved = {
            d: replace(o, window=replace(o.window, pid=os.getpid())) for d, o in offers.items()
        }
        return ways(moved, *args, **kwargs)

    monkeypatch.setattr(move, "ways", astray)
    with tools.at_boundary(adapter):
        receipt = hand.extend(Layout(1, 2), [1, 2])
        assert not fleet.may_read
        again = hand.extend(Layout(1, 2), [3, 2], ACTOR_GENERATE)
    for made in (receipt, again):
        assert made.moved_bytes > 0
    assert tools.sha256(harness.peek(receipt.created[0].id)) == before
    with tools.at_boundary(adapter):
        hand.destroy(0)
    harness.step()  # weights go through a group too


def test_a_sender_killed_while_it_is_read_leaves_nothing(harness, tools):
    adapter = harness.launch(harness.job(), tools.packed(harness.job()))
    hand = tools.Hand(adapter)
    with tools.at_boundary(adapter):
        hand.extend(Layout(1, 1), [1])
        first, second = hand.ids(ACTOR_TRAIN)
        before, files = tools.sha256(harness.peek(first)), set(os.listdir("/dev/shm"))
        harness.pool.call(hand.devices[1], "fail_at", phase="transfer", kind="kill").wait(60)
        with pytest.raises(UnitLost) as caught:
            hand.extend(Layout(1, 1), [2])
        assert caught.value.lost == (second,)
        assert hand.ids(ACTOR_TRAIN) == (first,)
        assert harness.memory_bytes(hand.devices[2]) == 0
        assert set(os.listdir("/dev/shm")) <= files
        assert tools.sha256(harness.peek(first)) == before
    harness.running_job.give([hand.devices[1]])


@pytest.mark.parametrize("may_read", [True, False], ids=["read", "sent"])
def test_a_bucket_that_arrives_changed_is_not_committed(harness, tools, may_read):
    adapter = harness.launch(harness.job(), tools.packed(harness.job()))
    harness.running_job.fleet.may_read = may_read
    hand = tools.Hand(adapter)
    before = tools.sha256(harness.peek(hand.ids(ACTOR_TRAIN)[0]))
    with tools.at_boundary(adapter):
        harness.pool.call(hand.devices[1], "fail_at", phase="transfer", kind="corrupt").wait(60)
        with pytest.raises(Garbled, match=r"arrived changed .* nothing was committed"):
            hand.extend(Layout(1, 1), [1])
        assert len(hand.ids(ACTOR_TRAIN)) == 1
        assert harness.memory_bytes(hand.devices[1]) == 0
        receipt = hand.extend(Layout(1, 1), [1])
    assert tools.sha256(harness.peek(receipt.created[0].id)) == before


def _digests(count):
    return tuple(xxhash.xxh3_64() for _ in range(count))
