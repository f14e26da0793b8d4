"""Weights on hosts that end and come again under their names: processes of this machine."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from host_processes import WAIT_S, Host
from rollout_fakes import ONE, SPEC, Fake

from nereus_adapters.rollout.delivery import Delivery
from nereus_adapters.rollout.hosts import HostLost, WeightsRemoved
from nereus_adapters.rollout.ports import EngineError, EngineLost
from nereus_adapters.rollout.supply import Supply
from nereus_adapters.rollout.weights import Published, assign, cells_bytes
from nereus_core.cluster import Device
from nereus_core.errors import WaitTimeout
from nereus_core.state import unit_shards

pytestmark = pytest.mark.real

A, B = Device("node0", 0), Device("node1", 0)
C, D = Device("node2", 0), Device("node3", 0)


class Cluster:
    """Nodes, each with a host that is started when it is needed, again and again."""

    def __init__(self):
        self.hosts, self.gone = {}, set()

    def of(self, node):
        if node in self.gone:
            raise HostLost(node, "start", "there is no such node")
        if node not in self.alive():
            self.hosts[node] = Host(node)
        return self.hosts[node]

    def alive(self):
        return {node: host for node, host in self.hosts.items() if host.alive}


class Training:
    """A trainer whose weights are on one device."""

    version = 1

    def __init__(self, cluster, device=A):
        self.cluster, self.device, self.published = cluster, device, 0

    def publish(self, store):
        self.published += 1
        (cells,) = assign(SPEC, [(self.device, unit_shards(SPEC, ONE)[0])], 1).values()
        name = store.hosts.reserve(self.device, cells_bytes(cells, "float32"))
        pieces = self.cluster.of(self.device.node).ask("write", name, cells).result(WAIT_S)
        store.add(Published(self.version, SPEC, "float32", tuple(pieces)))


class Engine(Fake):
    """An engine that reads nothing."""

    def __init__(self, device):
        super().__init__("e")
        self.devices = (device,)

    @property
    def holders(self):
        return {int(p.segment.split("-")[0]) for m in self.given for r in m.ranks for p in r}


@contextmanager
def made(wait_s=WAIT_S):
    cluster = Cluster()
    delivery = Delivery(cluster, "127.0.0.1", wait_s=wait_s)
    try:
        yield cluster, delivery
    finally:
        delivery.close()
        for host in cluster.alive().values():
            host.close()


@pytest.fixture
def there():
    """A cluster, its delivery, a trainer on A, and what is supplied to engines."""
    with made() as (cluster, delivery):
        trainer = Training(cluster)
        supply = Supply(trainer, delivery)
        supply.ensure(1)
        yield cluster, delivery, trainer, supply


def test_a_source_whose_process_was_started_again_has_nothing_and_is_published_again(there):
    cluster, delivery, trainer, supply = there
    engine = Engine(B)
    supply.load(engine, 1)
    assert engine.holders == {cluster.of(B.node).pid}
    cluster.hosts[A.node].kill()
    cluster.of(A.node)  # another, under the same name
    assert not delivery.holds(supply.store.get(1))
    beside, elsewhere = Engine(A), Engine(Device("node2", 0))
    supply.load(beside, 1)
    supply.load(elsewhere, 1)
    assert beside.holders == {cluster.of(A.node).pid}
    assert elsewhere.holders == {cluster.of("node2").pid}
    assert trainer.published == 2
    assert delivery.holds(supply.store.get(1))


def test_a_target_whose_process_was_started_again_gets_the_weights_again(there):
    cluster, delivery, trainer, supply = there
    supply.load(Engine(B), 1)
    size = supply.store.get(1).num_bytes
    cluster.hosts[B.node].kill()
    engine = Engine(B)
    supply.load(engine, 1)
    assert engine.holders == {cluster.of(B.node).pid}
    assert trainer.published == 1
    assert delivery.sent_bytes == 2 * size
    supply.deliver(1, [engine])
    assert delivery.sent_bytes == 2 * size  # it is there


def test_an_engine_is_lost_with_its_own_host_alone(there):
    cluster, _, trainer, supply = there
    supply.load(Engine(B), 1)
    cluster.hosts[B.node].kill()
    cluster.gone.add(B.node)
    with pytest.raises(EngineLost, match="host node1 is gone"):
        supply.load(Engine(B), 1)
    assert trainer.published == 1


def test_weights_that_were_removed_are_named_and_those_in_their_place_are_given(there):
    cluster, delivery, trainer, supply = there
    old = supply.store.get(1)
    trainer.publish(supply.store)
    for call in (delivery.manifest, lambda p, place: delivery.deliver(p, [place])):
        with pytest.raises(WeightsRemoved, match="version 1 were removed"):
            call(old, (ONE, B))
    assert not delivery.holds(old)
    engine = Engine(B)
    supply.load(engine, 1)
    assert engine.holders == {cluster.of(B.node).pid}


def test_what_a_host_makes_after_it_was_given_up_is_removed():
    with made(wait_s=1.0) as (cluster, delivery):
        host = cluster.of(A.node)
        os.kill(host.pid, signal.SIGSTOP)
        try:
            with pytest.raises(WaitTimeout, match="host node0 to hold weights"):
                delivery.reserve(A, 100)
        finally:
            os.kill(host.pid, signal.SIGCONT)
        deadline_s = time.monotonic() + WAIT_S
        while host.ask("held").result(WAIT_S):
            assert time.monotonic() < deadline_s


def test_a_host_that_does_not_answer_is_an_error_of_the_engine(there):
    cluster, delivery, _, supply = there
    cluster.of(B.node)
    delivery._wait_s = 1.0
    os.kill(cluster.of(A.node).pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match="waited"):
            supply.load(Engine(B), 1)
        assert not delivery._lock.locked()
        assert delivery.holds(supply.store.get(1))  # nothing else waits for it
    finally:
        os.kill(cluster.of(A.node).pid, signal.SIGCONT)
    delivery._wait_s = WAIT_S
    supply.load(Engine(B), 1)


def test_exchanges_that_share_no_host_run_side_by_side_and_others_one_after_another(there):
    cluster, delivery, _, supply = there
    other = Supply(Training(cluster, C), delivery)
    other.ensure(1)
    target = cluster.of(B.node)
    os.kill(target.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as threads:
            slow = threads.submit(supply.load, Engine(B), 1)
            until(lambda: delivery._turns._come)
            other.load(elsewhere := Engine(D), 1)
            assert elsewhere.holders == {cluster.of(D.node).pid}
            behind = threads.submit(other.load, late := Engine(B), 1)
            until(lambda: len(delivery._turns._come) == 2)
            assert not slow.done()
            os.kill(target.pid, signal.SIGCONT)
            slow.result(WAIT_S)
            behind.result(WAIT_S)
    finally:
        os.kill(target.pid, signal.SIGCONT)
    assert late.holders == {target.pid}
    size = supply.store.get(1).num_bytes
    assert delivery.sent_bytes == 3 * size
    # Hosts that met go on in the group they are in, those that left another meet anew.
    before = delivery._meetings.of({n: cluster.of(n) for n in (C.node, B.node)})
    assert before is not None
    assert delivery._meetings.of({n: cluster.of(n) for n in (C.node, D.node)}) is None
    cluster.hosts[D.node].kill()
    other.load(Engine(D), 1)
    assert delivery.sent_bytes == 4 * size


@pytest.mark.parametrize(
    ("gone", "left"), [(A, C), (C, A)], ids=["who held the meeting", "another"]
)
def test_hosts_go_on_in_a_group_that_another_has_left(gone, left):
    """B sends to A and C, who meet on A; one of them then meets D, for other weights."""
    with made() as (cluster, delivery):
        trainer = Training(cluster, B)
        supply, other = Supply(trainer, delivery), Supply(Training(cluster, D), delivery)
        supply.ensure(1)
        other.ensure(1)
        supply.deliver(1, [Engine(A), Engine(C)])

        def group(*devices):
            return delivery._meetings.of({d.node: cluster.of(d.node) for d in devices})

        three, size = group(A, B, C), supply.store.get(1).num_bytes
        assert three is not None
        assert delivery.sent_bytes == 2 * size
        other.load(Engine(gone), 1)
        assert group(gone, D) not in (None, three)
        assert group(left, B) == three

        trainer.version = 2
        supply.ensure(2)
        supply.load(engine := Engine(left), 2)
        assert engine.holders == {cluster.of(left.node).pid}
        assert delivery.sent_bytes == 4 * size
        assert group(left, B) == three  # they did not have to meet anew
        # and whoever has left is reached again, by a new meeting of all
        supply.deliver(2, [engine, back := Engine(gone)])
        supply.load(back, 2)
        assert back.holders == {cluster.of(gone.node).pid}
        assert delivery.sent_bytes == 5 * size
        delivery.check(supply.store.get(2), [(ONE, left), (ONE, gone)])


def test_engines_of_one_host_that_ask_at_once_get_the_weights_once(there):
    cluster, delivery, _, supply = there
    cluster.of(B.node)
    engines = [Engine(B) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda engine: supply.load(engine, 1), engines))
    assert {holder for engine in engines for holder in engine.holders} == {cluster.of(B.node).pid}
    assert delivery.sent_bytes == supply.store.get(1).num_bytes


def until(holds):
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
