"""Groups are made by their members only, and a missing or lost member is named, not waited for."""

import time

import engine_peers as ep
import pytest
import torch

from nereus_adapters.torch.engine import PeerLost, make_group, members
from nereus_core.errors import NereusError, WaitTimeout
from nereus_core.layout import Layout

pytestmark = pytest.mark.real


def _collectives(rank, store, prefix):
    group = make_group(store, prefix, rank, 3, ep.CPU, ep.TIMEOUT_S)
    found = {
        "sum": group.all_reduce(torch.tensor([1.0, rank])).tolist(),
        "max": group.all_reduce(torch.tensor([1.0, rank]), "max").tolist(),
        "strided": group.all_reduce(torch.ones(2, 3).t()[:, :1] * rank).tolist(),
        "gather": group.all_gather_uneven(torch.full((2, rank + 1), rank), 1, [1, 2, 3]).tolist(),
        "broadcast": group.broadcast(torch.tensor([rank]), 2).tolist(),
    }
    if rank == 0:
        group.send(torch.tensor([5.0]), 2)
    if rank == 2:
        found["received"] = group.recv(torch.zeros(1), 0).tolist()
    group.barrier()
    group.close()
    return found


def test_collectives(peers):
    first, second, third = peers.run(3, _collectives)
    assert first["sum"] == [3.0, 3.0]
    assert first["max"] == [1.0, 2.0]
    assert first["strided"] == [[3.0], [3.0], [3.0]]
    assert first["gather"] == [[0, 1, 1, 2, 2, 2]] * 2
    assert first["broadcast"] == [2]
    assert third.pop("received") == [5.0]
    assert first == second == third


def _subset(rank, store, prefix):
    """Two of three make a group; the third never hears of it."""
    if rank == 2:
        return None
    group = make_group(store, prefix, rank, 2, ep.CPU, ep.TIMEOUT_S)
    result = group.all_reduce(torch.ones(1)).item()
    group.close()
    return result


def test_only_members_take_part(peers):
    assert peers.run(3, _subset) == [2.0, 2.0, None]


def _lost(rank, store, prefix):
    group = make_group(store, prefix, rank, 3, ep.CPU, ep.TIMEOUT_S)
    group.barrier()
    if rank == 1:
        group.close()
        return None
    start_s = time.perf_counter()
    try:
        group.all_reduce(torch.ones(1000))
    except PeerLost as error:
        return str(error), time.perf_counter() - start_s
    finally:
        group.close()
    return "did not notice", 0.0


def test_a_lost_member_raises_at_once(peers):
    results = peers.run(3, _lost)
    for message, seconds in (results[0], results[2]):
        assert "broke during all_reduce" in message
        assert seconds < 5.0


def _late(rank, store, prefix):
    group = make_group(store, prefix, rank, 2, ep.CPU, 0.5)
    message = ""
    if rank == 0:
        try:
            group.recv(torch.zeros(1), 1)
        except WaitTimeout as error:
            message = str(error)
        store.set(f"{prefix}/done", "1")
    else:
        store.wait([f"{prefix}/done"])
    group.close()
    return message


def test_a_silent_member_is_named_after_the_timeout(peers):
    message = peers.run(2, _late)[0]
    assert message.startswith("waited 0.5 s for receive from rank 1 in group g")


def _alone(rank, store, prefix):
    try:
        make_group(store, prefix, 0, 2, ep.CPU, 0.5)
    except WaitTimeout as error:
        return str(error)
    return "met nobody and did not notice"


def test_a_member_that_never_comes_is_waited_for_in_vain(peers):
    (message,) = peers.run(1, _alone)
    assert message.startswith("waited 0.5 s for 2 members of group g")


def test_a_group_of_one_needs_no_store():
    group = make_group(None, "one", 0, 1, ep.CPU, 1.0)
    tensor = torch.arange(3.0)
    assert group.all_reduce(tensor) is tensor
    assert group.broadcast(tensor, 0) is tensor
    assert group.all_gather_uneven(tensor, 0, [3]) is tensor
    group.barrier()
    with pytest.raises(NereusError, match="no store"):
        make_group(None, "two", 0, 2, ep.CPU, 1.0)


def test_members_of_each_group():
    model = ep.spec_of(ep.LLAMA)  # 2 kv heads, tied embeddings
    layout = Layout(4, 2)
    assert members(model, layout, 0) == {
        "tp": (0, 1, 2, 3),
        "pp": (0, 4),
        "unit": tuple(range(8)),
        "kv": (0, 1),
        "ends": (0, 4),
    }
    assert members(model, layout, 7)["kv"] == (6, 7)
    assert "kv" not in members(model, Layout(2, 1), 0)
    assert "ends" not in members(model, Layout(2, 1), 0)
    assert "ends" not in members(model, Layout(1, 3), 1)
