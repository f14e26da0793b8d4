"""Who does not know the job's secret gets into no group; what it writes is not taken for true."""

import hashlib
import multiprocessing
import socket
import struct
import time

import pytest

torch = pytest.importorskip("torch")

import group_member  # noqa: E402
import torch.distributed as dist  # noqa: E402

from nereus_adapters.torch.engine import PeerLost, make_group  # noqa: E402
from nereus_adapters.torch.store import (  # noqa: E402
    SealedStore,
    Tampered,
    listening_store,
    open_store,
    tcp_address,
)

pytestmark = pytest.mark.real

SECRET = hashlib.sha256(b"the job").digest()


@pytest.fixture
def store():
    return listening_store(0, "127.0.0.1")


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def meet(store, secrets, seals=None):
    """Let processes meet, one for each secret; return what each tells, by rank."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    address = tcp_address("127.0.0.1", store.port)
    seals = seals or [SECRET] * len(secrets)
    processes = [
        spawn.Process(
            target=group_member.member, args=(address, len(secrets), r, secret, seals[r], answers)
        )
        for r, secret in enumerate(secrets)
    ]
    for process in processes:
        process.start()
    try:
        return dict(answers.get(timeout=240) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def test_members_of_the_job_form_a_group(store):
    assert meet(store, [SECRET] * 3) == {0: 6.0, 1: 6.0, 2: 6.0}


def test_an_impostor_is_named_and_the_group_given_up(store):
    """It has got past the store, and speaks gloo."""
    found = meet(store, [SECRET, hashlib.sha256(b"somebody").digest(), SECRET])
    assert all(isinstance(answer, str) for answer in found.values()), found
    assert found[0].startswith("PeerLost: group g/1 broke during meeting: rank 1 does not know")
    assert "rank 1 does not know the job's secret" in found[2] or "broke" in found[2]


def test_a_member_that_cannot_seal_is_refused_by_those_that_can(store):
    found = meet(store, [SECRET, SECRET], seals=[SECRET, hashlib.sha256(b"somebody").digest()])
    assert found[0].startswith("Tampered: "), found
    assert "does not bear the job's seal" in found[0]


def test_what_a_raw_socket_writes_into_the_store_is_refused(store):
    """TCPStore's own protocol, spoken by hand: a value under a key that a seat waits for."""
    ours = open_store(tcp_address("127.0.0.1", store.port), 20.0, SECRET)
    ours.set("mine", b"address of rank 0")
    assert ours.get("mine") == b"address of rank 0"

    with socket.create_connection(("127.0.0.1", store.port), 10) as stranger:
        for part in (_validate(), _set(b"/mine", b"address of a stranger")):
            stranger.sendall(part)
        outside = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        _until(lambda: bytes(outside.get("mine")) == b"address of a stranger")

    with pytest.raises(Tampered, match="mine in the store of the job does not bear the job's seal"):
        ours.get("mine")


def test_a_value_that_was_moved_to_another_key_is_refused(store):
    ours = SealedStore(store, SECRET)
    ours.set("generation 1", b"old address")
    store.set("generation 2", bytes(store.get("generation 1")))
    with pytest.raises(Tampered, match="generation 2"):
        ours.get("generation 2")


def test_a_store_that_was_written_to_stops_a_group_with_its_name(store):
    store.set("g/2/0/1", b"not sealed")
    with pytest.raises((Tampered, PeerLost), match="does not bear the job's seal"):
        make_group(SealedStore(store, SECRET), "g/2", 0, 2, group_member.CPU, 5.0, SECRET)


# Of TCPStoreLibUvBackend (torch/csrc/distributed/c10d/TCPStoreBackend.hpp): one byte names the
# query; strings and vectors follow their length, 64 bits, in the order of this machine.
_VALIDATE, _SET, _MAGIC = 0, 1, 0x3C85F7CE


def _validate():
    return struct.pack("=BI", _VALIDATE, _MAGIC)


def _set(key, value):
    return struct.pack(f"=BQ{len(key)}sQ{len(value)}s", _SET, len(key), key, len(value), value)


def _until(holds):
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s, "the store has not taken the value within 10 s"
