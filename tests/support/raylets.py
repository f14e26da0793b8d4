"""A Ray cluster of raylets on this machine: a head without seats, and nodes that come and go."""

import os
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import ray
from ray._private import services
from ray.cluster_utils import Cluster

# A cluster takes its time on a hurried machine; a hang must still end the test.
WAIT_S = 180.0
STORE_BYTES = 80 * 2**20
# Workers that nobody asked for take as long to start as those that the tests wait for.
# Ray gives its workers way to all else (nice 15); beside a busy process they would hardly run.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}
# A lost raylet is declared dead after about 3 s instead of 13.
QUICK_DEATH = {"health_check_period_ms": 500, "health_check_failure_threshold": 5}


class Nodes:
    """Raylets started by the test; ends only those."""

    def __init__(self):
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "_system_config": QUICK_DEATH,
            },
        )
        self.address = self.cluster.address

    def add(self, num_cpus=2):
        return self.cluster.add_node(num_cpus=num_cpus, object_store_memory=STORE_BYTES)

    def kill(self, node):
        self.cluster.remove_node(node, allow_graceful=False)

    def of(self, node_id):
        return next(n for n in self.cluster.list_all_nodes() if n.node_id == node_id)

    def drain(self, node_id, seconds):
        """Announce that a node will be gone, as a cloud's spot notice does."""
        from ray._raylet import GcsClient

        preempted = 2  # autoscaler.proto, DRAIN_NODE_REASON_PREEMPTION
        deadline_ms = int((time.time() + seconds) * 1000)
        accepted, why = GcsClient(address=self.address).drain_node(
            node_id, preempted, "spot notice", deadline_ms
        )
        assert accepted, why


@contextmanager
def cluster():
    """Start a cluster, and end it."""
    with (
        mock.patch.dict(os.environ, ENVIRONMENT),
        mock.patch.object(services, "get_node", _patient),
    ):
        made = Nodes()
        try:
            yield made
        finally:
            if ray.is_initialized():
                ray.shutdown()
            made.cluster.shutdown()


_get_node = services.get_node


def _patient(*args, **kwargs):
    """Ask for a node that is starting until it is there: Ray itself gives it 30 s.

    A raylet registers when its agents are up, which import much: on a busy machine that takes long.
    """
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return _get_node(*args, **kwargs)
        except RuntimeError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


@pytest.fixture
def nodes():
    """A cluster for one test."""
    with cluster() as made:
        yield made


@pytest.fixture
def until():
    """Wait for a condition; fails naming it."""

    def wait(holds, what, timeout_s=WAIT_S):
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            time.sleep(0.05)

    return wait
