"""Seats on Ray: placed on its nodes, dead when their node is, announced and replaced."""

import pickle

import pytest
import ray

from nereus_adapters.torch.ray_pool.pool import RayPool
from nereus_adapters.torch.wire import SeatError
from nereus_core.cluster import Device
from nereus_core.errors import ConfigError, DevicesMissing, SeatDead, WaitTimeout

pytestmark = pytest.mark.real

FIRST, SECOND, OTHER = Device("node0", 0), Device("node0", 1), Device("node1", 0)
WAIT_S = 90.0


@pytest.fixture
def pool(nodes):
    nodes.add()
    nodes.add()
    opened = RayPool("cpu", {"node0": 2, "node1": 2}, address=nodes.address)
    yield opened
    opened.close()


def test_seats_live_and_die_with_the_nodes_of_the_cluster(nodes, pool, until):
    pool.start([FIRST, SECOND, OTHER])
    assert pool.node_id(FIRST) == pool.node_id(SECOND) != pool.node_id(OTHER)
    assert len({pool.pid(d) for d in (FIRST, SECOND, OTHER)}) == 3

    # An error keeps its class, and brings the seat's traceback.
    with pytest.raises(SeatError, match="drop on seat node0:0: KeyError") as caught:
        pool.call(FIRST, "drop", unit="nobody").wait(WAIT_S)
    assert "self.units.pop(unit)" in caught.value.__notes__[0]

    # Calls under way fail by name when the seat is killed; others go on.
    pool.call(SECOND, "fail_at", phase="prepare", kind="hang").wait(WAIT_S)
    pending = pool.call(SECOND, "prepare", part=None)
    pool.kill(SECOND)
    with pytest.raises(SeatDead, match=r"node0:1 ended .* during prepare"):
        pending.wait(WAIT_S)
    assert pool.alive == {FIRST, OTHER}
    with pytest.raises(SeatDead, match="during hello"):
        pool.call(SECOND, "hello").wait(WAIT_S)

    # A seat that ends by itself is noticed with no call under way.
    pool.call(FIRST, "fail_at", phase="prepare", kind="kill").wait(WAIT_S)
    pool.call(FIRST, "prepare", part=None)
    until(lambda: FIRST not in pool.alive, "the end of a seat")

    # Both are replaced where they were; a node that is about to leave is announced.
    pool.start([FIRST, SECOND])
    assert pool.alive == {FIRST, SECOND, OTHER}
    assert pool.draining == pool.returned == frozenset()
    lost = pool.node_id(OTHER)
    nodes.drain(lost, 600)
    until(lambda: pool.draining == {OTHER}, "the drain notice")

    # A lost node takes its seats; a new one brings them back, up before the job takes them in.
    nodes.kill(nodes.of(lost))
    until(lambda: OTHER not in pool.alive, "the loss of a node")
    assert pool.alive == {FIRST, SECOND}
    # Ray may not have missed the node yet: then the new seat ends while it starts.
    with pytest.raises(SeatDead, match=r"seat node1:0 ended .* during start"):
        pool.start([OTHER])
    nodes.add()
    until(lambda: pool.returned == {OTHER}, "the seat on the new node")
    assert OTHER not in pool.alive
    pool.start([OTHER])
    assert pool.alive == {FIRST, SECOND, OTHER}
    assert pool.returned == frozenset()
    assert pool.node_id(OTHER) != lost


def test_what_cannot_be_is_named_and_nothing_is_left(nodes, monkeypatch):
    nodes.add(num_cpus=1)
    with pytest.raises(ConfigError, match=r"backend\.address: '127\.0\.0\.1:1'"):
        RayPool("cpu", {"node0": 1}, address="127.0.0.1:1")
    # The cluster that the environment names is the one that is meant: no other is started.
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"backend\.address: '127\.0\.0\.1:1'"):
        RayPool("cpu", {"node0": 1})
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(DevicesMissing, match="needs 3 Ray CPU devices, this machine has 1"):
        RayPool("cpu", {"node0": 3}, address=nodes.address)
    pool = RayPool("cpu", {"node0": 1}, address=nodes.address)
    with pytest.raises(ConfigError, match=rf"backend\.port: {pool.port} .*in use"):
        RayPool("cpu", {"node0": 1}, address=nodes.address, port=pool.port)
    pool.close()
    pool.close()


def test_settings_cross_as_bytes():
    """An actor is a plain class: what it is given can be read on any node."""
    from nereus_adapters.torch.ray_pool.actor import SeatActor

    assert pickle.loads(pickle.dumps(SeatActor)) is SeatActor


def test_a_seat_that_does_not_come_up_in_time_is_named_with_its_node_and_its_limit(nodes):
    nodes.add()
    opened = RayPool("cpu", {"node0": 1}, address=nodes.address, start_s=90.0)
    try:
        opened._start_s = 0.01  # the placement above has had its own
        what = r"waited 0\.01 s for seat node0:0 to come up on Ray node [0-9a-f]+: .*start_s"
        with pytest.raises(WaitTimeout, match=what):
            opened.start([FIRST])
    finally:
        opened.close()


def test_a_cluster_that_cannot_be_joined_is_left_alone(nodes, monkeypatch, caplog):
    """One of another version of Ray, which happens to run on this machine."""
    nodes.add()
    join = ray.init

    def init(address, **options):
        with monkeypatch.context() as patch:
            if address == "auto":
                address = nodes.address
                patch.setattr(ray, "__version__", "2.0.0")
            return join(address=address, **options)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pool = RayPool("cpu", {"node0": 1})
    try:
        assert "is left alone: Version mismatch" in caplog.text
        pool.start([FIRST])
        assert pool.alive == {FIRST}
        theirs = {node.node_id for node in nodes.cluster.list_all_nodes()}
        assert pool.node_id(FIRST) not in theirs
        ray.util.remove_placement_group(pool._nodes._group)
        with pytest.raises(SeatDead, match="Ray has no node for node0 now"):
            pool.start([FIRST, SECOND])
    finally:
        pool.close()
