"""Segments: read by other processes, held by one, gone with it."""

import os
import signal
import subprocess
import sys

import pytest

from nereus_adapters.rollout.segment import Segment, held, path, remove, reserve

HOLDER = """
from nereus_adapters.rollout.segment import Segment, reserve
name = reserve(1 << 20)
with Segment(name, writable=True) as segment, segment.view(0, 5) as place:
    place[:] = b"hello"
print(name, flush=True)
input()
"""


@pytest.fixture
def name():
    made = reserve(4096)
    yield made
    remove([made])


def test_what_one_process_writes_others_read_while_it_holds_it():
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        name = holder.stdout.readline().strip()
        with Segment(name) as segment:
            assert bytes(segment.view(0, 5)) == b"hello"
            holder.send_signal(signal.SIGKILL)
            holder.communicate(timeout=30)
            assert bytes(segment.view(0, 5)) == b"hello"  # mapped: it stays
        with pytest.raises(FileNotFoundError):
            Segment(name)
    finally:
        holder.kill()
        holder.communicate(timeout=30)


def test_what_a_reader_writes_stays_with_the_reader(name):
    with Segment(name) as mine, mine.view(0, 3) as place:
        place[:] = b"own"
    with Segment(name) as segment:
        assert bytes(segment.view(0, 3)) == bytes(3)


def test_a_segment_that_was_let_go_of_is_not_another_file(name):
    descriptor = int(path(name).name)
    remove([name])
    other = os.memfd_create("other")
    try:
        assert other == descriptor  # the lowest that is free
        with pytest.raises(FileNotFoundError, match="held no more"):
            Segment(name)
    finally:
        os.close(other)


def test_nothing_has_a_name_in_shared_memory(name):
    assert name in held()
    assert os.readlink(path(name)).startswith("/memfd:nereus-weights")
    remove([name])
    remove([name])
    assert name not in held()
