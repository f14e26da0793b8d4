"""How long parties wait for one another's weights: as long as what comes first may take."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from nereus_adapters.rollout.mirror import Party, Shipment
from nereus_adapters.rollout.port import free_port
from nereus_adapters.rollout.segment import Segment, remove, reserve
from nereus_adapters.rollout.weights import Cell, Piece
from nereus_core.errors import WaitTimeout
from nereus_core.state import Box

pytestmark = pytest.mark.real

NAMES, SIZE = ("a", "b", "c"), 2**16
FLOOR_S, LATE_S = 1.0, 3.0


@pytest.fixture
def piece():
    """A piece in a segment of this process, where all parties are."""
    content = np.random.default_rng(0).bytes(SIZE)
    name = reserve(SIZE)
    with Segment(name, writable=True) as segment, segment.view(0, SIZE) as place:
        place[:] = content
    box = Box((0,), (SIZE,))
    yield Piece(Cell("t", box), name, 0, SIZE, xxhash.xxh3_64_intdigest(content))
    remove([name])


def exchanged(piece, bytes_per_s):
    """Let a send to b, and b to c, where a comes late; return what each party got, or its error.

    All are in one group before: only messages are waited for.
    """
    listed = [Shipment("a", "b", (piece,)), Shipment("b", "c", (piece,))]
    address, joined = ("127.0.0.1", free_port()), threading.Barrier(len(NAMES))

    def be(name):
        party = Party(name, NAMES, address, timeout_s=60.0, bytes_per_s=bytes_per_s)
        try:
            joined.wait(60)
            party._timeout_s = FLOOR_S
            if name == "a":
                time.sleep(LATE_S)  # how late a party comes is what is tested
            return party.exchange(listed)
        except WaitTimeout as error:
            return error
        finally:
            party.close()

    with ThreadPoolExecutor(len(NAMES)) as threads:
        return dict(zip(NAMES, threads.map(be, NAMES), strict=True))


def test_a_party_waits_as_long_as_the_bytes_before_its_own_may_take(piece):
    found = exchanged(piece, bytes_per_s=SIZE / 20)
    for name in ("b", "c"):
        (got,) = found[name]
        with Segment(got.segment) as segment, segment.view(got.offset, SIZE) as content:
            got.check(content, 1)
        remove([got.segment])


def test_a_party_that_is_later_than_that_is_named_with_bytes_and_limit(piece):
    found = exchanged(piece, bytes_per_s=1e9)
    error = found["b"]
    assert isinstance(error, WaitTimeout)
    assert f"party a to send weights ({SIZE} bytes; {SIZE} with those before them)" in str(error)
    assert error.timeout_s == FLOOR_S + SIZE / 1e9
    assert f"{2 * SIZE} with those before them" in str(found["c"])
