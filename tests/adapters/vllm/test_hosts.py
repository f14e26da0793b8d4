"""Engines on two hosts: raylets of this machine that share no memory: weights travel."""

import itertools
import os
import signal
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest
from raylets import cluster
from raylets import until as until
from vllm_cases import ONE, TP2, Weights, prompts
from vllm_torch_job import config, greedy

from nereus_adapters.rollout.segment import held, path
from nereus_adapters.torch.adapter import TorchAdapter
from nereus_adapters.torch.launch import TorchLaunched
from nereus_core.cluster import Device
from nereus_core.errors import Infeasible, UnitLost
from nereus_core.plan import Plan
from nereus_core.primitives import Destroy, Extend, Merge, Split
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN

pytestmark = pytest.mark.real

A, A1 = Device("node0", 0), Device("node0", 1)
B, B1 = Device("node1", 0), Device("node1", 1)
WAIT_S = 180.0
START_S = 400.0
"""Of seats, each of which imports torch, and of what imports vLLM, where others use the machine."""


class Running:
    """A torch job that trains on host A, with a vLLM engine there; other engines may be on B."""

    def __init__(self, nodes, folder, **job):
        nodes.add()
        nodes.add()
        values = config(
            folder, pool="ray", address=nodes.address, seats=4, nodes=2, start_s=START_S
        )
        plan = {"actor/generate": {"layout": "tp1pp1dp1", "devices": [str(A)]}}
        changed = {**values.job, **job, "plan": {**values.job["plan"], **plan}}
        self.launched = TorchLaunched.of(values.model_copy(update={"job": changed}))
        self.job = self.launched.handle
        self.folder = next((folder / "models").iterdir())
        self.adapter = TorchAdapter(self.job)
        self._serials = itertools.count(10)

    @property
    def hosts(self):
        return self.job.engines.factory.pool.hosts

    @property
    def own(self):
        return self.adapter.units().of(ACTOR_GENERATE)

    def perform(self, op):
        with self.adapter.boundary([ACTOR_GENERATE], timeout_s=60):
            getattr(self.adapter, type(op).__name__.lower())(op)
            self.adapter.relink(Plan.of_units(self.adapter.units()))

    def unit(self, layout, *devices):
        return Unit(UnitId(ACTOR_GENERATE, next(self._serials)), layout, devices)

    def extend(self, device):
        unit = self.unit(ONE, device)
        self.perform(Extend(f"extend {unit.id}", (self.own[0].id,), unit))
        return unit

    def require_right_tokens(self):
        """Require each engine's greedy tokens to be Hugging Face's for the weights of training."""
        for engine in self.job.engines.fleet.engines().values():
            for prompt in prompts(2, 16):
                found = engine.submit(prompt).result(WAIT_S)
                assert found.tokens == greedy(self.job, self.folder, prompt.tokens), engine.name

    def require_read_on_own_host(self):
        """Require engines to read from memory that the process of their own host holds."""
        published = self.job.engines.given(self.own[0].id)
        for unit in self.own:
            manifest = self.hosts.weights.manifest(published, (unit.layout, unit.devices[0]))
            holders = {int(p.segment.split("-")[0]) for rank in manifest.ranks for p in rank}
            assert holders == {self.hosts.of(unit.devices[0].node).pid()}


@pytest.fixture(scope="module")
def nodes():
    with cluster() as made:
        yield made


@pytest.fixture(scope="module")
def running(nodes, tmp_path_factory):
    """One job for all tests here, in their order: each goes on from what those before it left.

    The first leaves a replica on B and one on A; the last loses B.
    """
    made = Running(
        nodes, tmp_path_factory.mktemp("job"), prompts_per_step=6, max_response_tokens=100
    )
    yield made
    made.launched.close()
    assert not held()


def test_a_replica_moves_to_another_host_and_its_weights_with_it(running):
    running.require_right_tokens()
    assert running.hosts.delivery.sent_bytes == 0  # training and engine are on one host
    there = running.extend(B)
    size = running.job.engines.given(there.id).num_bytes
    assert running.hosts.delivery.sent_bytes == size
    running.require_right_tokens()
    running.require_read_on_own_host()
    running.perform(Destroy("from A", running.own[0].id))
    assert [unit.devices for unit in running.own] == [(B,)]
    for step in (1, 2):  # each brings new weights over the network, once
        running.launched.step()
        assert running.hosts.delivery.sent_bytes == (1 + step) * size
        running.require_right_tokens()
        running.require_read_on_own_host()
    other = running.extend(B1)
    assert running.hosts.delivery.sent_bytes == 3 * size  # what is there is not sent again
    here = running.extend(A)
    with pytest.raises(Infeasible, match=r"tp2pp1 would lie on node0 and node1"):
        running.perform(Merge("across", (here.id, there.id), running.unit(TP2, A, B)))
    running.perform(Destroy("from A again", here.id))
    running.perform(Merge("on B", (there.id, other.id), running.unit(TP2, B, B1)))
    running.require_right_tokens()
    running.require_read_on_own_host()
    merged, train = (running.adapter.units().of(s)[0].id for s in (ACTOR_GENERATE, ACTOR_TRAIN))
    seen, trained = (running.adapter.fingerprint(unit) for unit in (merged, train))
    assert {k: trained.tensors[k] for k in seen.tensors} == seen.tensors
    halves = (running.unit(ONE, B), running.unit(ONE, B1))
    running.perform(Split("on B again", merged, halves))
    running.perform(Destroy("from B1", halves[1].id))
    running.extend(A)
    running.require_right_tokens()


def test_weights_garbled_between_hosts_are_published_again(running):
    job = running.job.engines
    version, hosts = job.trainer.version, running.hosts.weights
    engine = job.factory.create("on B1", ONE, (B1,))
    try:
        manifest = hosts.manifest(job.supply.store.get(version), (ONE, B1))
        piece = manifest.ranks[0][-1]
        with path(piece.segment).open("r+b") as content:
            content.seek(piece.offset)
            first = content.read(1)[0]
            content.seek(piece.offset)
            content.write(bytes([first ^ 1]))
        job.supply.load(engine, version)
        for prompt in prompts(2, 16):
            found = engine.submit(prompt).result(WAIT_S)
            assert found.tokens == greedy(running.job, running.folder, prompt.tokens)
    finally:
        engine.close()


def test_a_trainer_in_the_process_of_the_driver_sends_to_hosts_too(running):
    factory = running.job.engines.factory
    weights = Weights(running.folder, running.job.job.model(ACTOR_TRAIN), seed=11)
    engine = factory.create("elsewhere", ONE, (B1,))
    try:
        published = weights.publish(1)
        before = running.hosts.delivery.sent_bytes
        engine.update_weights(1, factory.hosts.manifest(published, (ONE, B1)))
        assert running.hosts.delivery.sent_bytes - before == published.num_bytes
        for prompt in prompts(2, 16):
            found = engine.submit(prompt).result(WAIT_S)
            assert found.tokens == weights.greedy(prompt.tokens, 16)[0]
        factory.hosts.remove(published.segments)
    finally:
        engine.close()
        weights.close()


def test_a_host_process_that_dies_while_its_node_lives_is_replaced(running, until):
    engines, hosts = running.job.engines, running.hosts
    (unit,) = (u for u in running.own if u.devices == (A,))
    host, rebuilt = hosts.of(A.node), engines.rebuilds.count
    folder = Path(engines.factory.pool.address(A)).parent
    (stem,) = (p for p in psutil.Process(host.pid()).children() if "stem" in " ".join(p.cmdline()))
    stem.kill()  # or it would remove the folder
    os.kill(host.pid(), signal.SIGKILL)
    until(lambda: not host.alive, "the end of the host's process")
    until(lambda: not engines.fleet.engine(unit.id).alive, "the end of its seats")
    assert not hosts.weights.holds(engines.given(unit.id))  # training had published there
    engines.rebuilds.soon(unit.id)
    # A process on A imports vLLM anew.
    until(lambda: engines.rebuilds.count == rebuilt + 1, "the engine to be built again", START_S)
    assert hosts.of(A.node) is not host
    assert not folder.exists()  # the process in its place has seen that nobody holds it
    assert hosts.weights.holds(engines.given(unit.id))
    running.require_right_tokens()
    running.require_read_on_own_host()
    running.launched.step()  # new weights go from the new process to the other host
    running.require_right_tokens()
    running.require_read_on_own_host()


def test_a_host_that_is_lost_takes_its_replica_and_no_token(nodes, until, running):
    assert [unit.devices for unit in running.own] == [(B,), (A,)]
    fleet = running.job.engines.fleet
    asked = prompts(12, 100)
    futures = [fleet.submit(prompt) for prompt in asked]
    nodes.kill(nodes.of(running.job.fleet.pool.node_id(B)))
    assert not wait(futures, WAIT_S).not_done
    assert fleet.moved > 0
    for prompt, future in zip(asked, futures, strict=True):
        tokens = future.result().tokens
        assert len(tokens) == 100
        assert tokens[:16] == greedy(running.job, running.folder, prompt.tokens)
    until(lambda: {B, B1} <= running.job.failed, "the loss of a node")

    # The job names what went, and goes on with what is left.
    with pytest.raises(UnitLost, match="actor/generate"):
        running.launched.step()
    with running.adapter.boundary([ACTOR_GENERATE], timeout_s=60):
        running.adapter.relink(Plan.of_units(running.adapter.units()))
    assert [unit.devices for unit in running.own] == [(A,)]
    running.launched.step()
    running.require_right_tokens()
    running.require_read_on_own_host()
