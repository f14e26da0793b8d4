"""Replicas that leave an asynchronous job: what becomes of requests, servers, and a failure.

Gates stand for servers, and plain actors of Ray where a process ends; no job runs.
"""

import os
import threading
from types import SimpleNamespace

import pytest
import ray
from verl_cpu.command import SUPPORT
from verl_cpu.leaving import LIMIT_S, Replica, Server, Weights, trainer

from nereus_adapters.verl import ending, rollouts, standalone
from nereus_adapters.verl.ending import end
from nereus_adapters.verl.rollouts import Rollouts
from nereus_adapters.verl.standalone import Standalone
from nereus_core.cluster import Device
from nereus_core.errors import PrimitiveError, WaitTimeout
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE

pytestmark = pytest.mark.real

HANGS_S = 3.0
"""Of the adapter, where something hangs."""


@pytest.fixture(scope="module", autouse=True)
def node():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def ended(monkeypatch):
    """Ranks of replicas in the order in which they are ended, and whether they keep a door."""
    found = {}

    def note(replicas, *, doors=()):
        found.update({replica.replica_rank: replica in doors for replica in replicas})

    monkeypatch.setattr(rollouts, "end", note)
    monkeypatch.setattr(standalone, "end", note)
    return found


def units(number):
    found = (
        Unit(UnitId(ACTOR_GENERATE, i), Layout(1, 1), (Device("node0", i),)) for i in range(number)
    )
    return {unit.id: unit for unit in found}


def colocated(replicas, sleepers=0, mode="colocate_async", wait_s=LIMIT_S):
    known = units(len(replicas))
    return Rollouts(trainer(replicas, mode), known, SimpleNamespace(), wait_s, sleepers), known


def first(known):
    return dict(list(known.items())[:1])


def test_one_that_hangs_keeps_no_other_from_its_door(ended, caplog):
    found, known = colocated(
        [Replica(0), Replica(1), Replica(2, "hangs"), Replica(3, "raises")], wait_s=HANGS_S
    )
    found.link(first(known))
    assert ended == {1: True, 2: False, 3: False}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "replica 2 did not let its requests go" in said[0]
    assert "not within 2.7 s" in said[0]
    assert "replica 3" in said[1]
    assert "this engine has failed" in said[1]


def test_what_a_server_has_stopped_is_answered_before_it_ends(ended):
    replicas = [Replica(0), Replica(1)]
    found, known = colocated(replicas)
    found.link(first(known))
    assert [replica.gate.under_way.left for replica in replicas] == [3, 0]
    assert [replica.gate.state for replica in replicas] == ["open", "turning"]


def test_replicas_that_sleep_keep_a_door_when_they_are_ended(ended):
    found, known = colocated([Replica(0), Replica(1), Replica(2)], sleepers=1)
    found.link(first(known))
    assert ended == {}
    found.leave()
    assert ended == {1: True, 2: True}


def test_a_replica_that_makes_room_keeps_a_door_and_one_that_hangs_does_not(ended):
    replicas = [Replica(0), Replica(1), Replica(2, beside=1), Replica(3, "hangs")]
    found, known = colocated(replicas, sleepers=1, wait_s=HANGS_S)
    found.link(first(known))
    assert ended == {1: True, 3: False}


def test_a_replica_that_never_served_keeps_a_door(ended):
    found, known = colocated([Replica(0)])
    made = UnitId(ACTOR_GENERATE, 1)
    found.replicas[made] = Replica(1)
    found.end(made)
    assert ended == {1: True}
    assert set(found.replicas) == set(known)


def test_nothing_of_a_synchronous_job_keeps_a_door(ended):
    found, known = colocated([Replica(0), Replica(1)], mode="sync")
    found.link(first(known))
    assert ended == {1: False}


def separated(replicas, weights=None):
    """Return one with the first replica in service, and a step under way."""
    known = units(len(replicas))
    fleet = SimpleNamespace(bundles=SimpleNamespace(let_go=lambda devices, unit: None))
    job = trainer(replicas[:1], "separate_async", weights or Weights())
    limit_s = LIMIT_S if weights is None else HANGS_S
    found = Standalone(job, first(known), fleet, limit_s, amid_step=lambda: True)
    for unit, replica in zip(known.values(), replicas, strict=True):
        replica.workers = []
        found.replicas[unit.id], found._units[unit.id] = replica, unit
    return found, known


def refused():
    raise RuntimeError("a receiver died")


def test_a_synchronization_that_fails_amid_a_step_is_made_up_for_on_the_way_back(ended):
    weights, replicas = Weights(refused), [Replica(0), Replica(1)]
    found, known = separated(replicas, weights)
    with pytest.raises(RuntimeError, match="a receiver died"):
        found.link(known)
    assert replicas[0].gate.state == "closed"
    found.link(first(known), anew=True)
    assert weights.asked == [5, 5]
    assert [replica.gate.state for replica in replicas] == ["open", "turning"]
    assert ended == {1: True}
    assert set(found.replicas) == set(first(known))
    found.link(first(known), anew=True)
    assert weights.asked == [5, 5]  # nobody is closed


def test_one_that_fails_again_is_no_way_back(ended):
    found, known = separated([Replica(0), Replica(1)], Weights(refused, refused))
    with pytest.raises(RuntimeError, match="a receiver died"):
        found.link(known)
    with pytest.raises(RuntimeError, match="a receiver died"):
        found.link(first(known), anew=True)


def test_no_synchronization_is_made_beside_one_that_is_late(ended):
    released = threading.Event()
    weights = Weights(released.wait)
    found, known = separated([Replica(0), Replica(1)], weights)
    with pytest.raises(WaitTimeout, match="weights for new replicas"):
        found.link(known)
    with pytest.raises(PrimitiveError, match="has not ended"):
        found.link(first(known), anew=True)
    assert weights.asked == [5]
    released.set()


@pytest.mark.parametrize("kind", [colocated, separated])
def test_a_balancer_that_does_not_let_go_leaves_a_way_back(ended, kind):
    replicas = [Replica(0), Replica(1)]
    found, known = kind(replicas)
    found.link(known)
    balancer = found._manager.global_load_balancer
    balancer.refuses = True
    with pytest.raises(RuntimeError, match="does not let go"):
        found.link(first(known))
    found.link(known, anew=True)
    assert balancer.names == {"server0", "server1"}
    assert set(found.replicas) == set(known)
    assert ended == {}


def servers(*faults):
    """Return a replica with real servers, which are up."""
    found = [Server.remote(fault) for fault in faults]
    ray.get([server.answer.remote() for server in found], timeout=LIMIT_S)
    return SimpleNamespace(servers=found)


def require_gone(server):
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(server.until_it_ends.remote(), timeout=LIMIT_S)


def test_a_server_without_a_door_ends_and_one_with_it_answers_until_it_ends_itself():
    shut, kept, closing = (servers("") for _ in range(3))
    end([shut, kept], doors=[kept], door_s=10 * LIMIT_S)
    end([closing], doors=[closing], door_s=0.1)
    require_gone(shut.servers[0])
    require_gone(closing.servers[0])
    assert ray.get(kept.servers[0].answer.remote(), timeout=LIMIT_S) == "aborted"


def test_a_server_whose_engine_does_not_end_is_killed():
    replica = servers("shutdown-raises")
    end([replica], doors=[replica], door_s=10 * LIMIT_S)
    require_gone(replica.servers[0])


def test_of_several_nodes_the_first_alone_keeps_a_door():
    """The others have no gate, and their engines live as long as they do."""
    replica = servers("", "")
    end([replica], doors=[replica], door_s=10 * LIMIT_S)
    require_gone(replica.servers[1])
    assert ray.get(replica.servers[0].answer.remote(), timeout=LIMIT_S) == "aborted"


def test_servers_that_do_not_answer_are_waited_for_together_and_killed(monkeypatch):
    """As if no engine ended: the answers are never there."""
    replica, waits = servers("", ""), []

    def wait(answers, **limits):
        waits.append((len(answers), limits))
        return [], answers

    monkeypatch.setattr(ending.ray, "wait", wait)
    monkeypatch.setattr(ending, "apart", lambda server, *_: server.until_it_ends.remote())
    end([replica], doors=[replica])
    assert waits == [(2, {"num_returns": 2, "timeout": ending.SHUTDOWN_S})]
    for server in replica.servers:
        require_gone(server)


def test_a_door_is_open_for_a_minute(monkeypatch):
    """Longer than a request is on its way; what it keeps of a machine is not kept for long."""
    replica, asked = servers(""), []
    apart = ending.apart
    monkeypatch.setattr(ending, "apart", lambda *call: asked.append(call[2]) or apart(*call))
    end([replica], doors=[replica])
    assert asked == [60.0]
