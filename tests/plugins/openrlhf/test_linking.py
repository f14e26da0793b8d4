"""What primitives of one stage share while groups are parked; OpenRLHF's groups are not there."""

import threading
from types import SimpleNamespace

import pytest
import torch

from nereus_adapters.openrlhf import groups
from nereus_adapters.openrlhf.adapter import OpenRLHFAdapter
from nereus_adapters.openrlhf.checks import refuse_unbuildable
from nereus_adapters.openrlhf.facts import BackendSection
from nereus_adapters.openrlhf.groups import Parked
from nereus_adapters.openrlhf.harness_behind import state_bytes
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.openrlhf.seats import Bundle
from nereus_adapters.openrlhf.signals import Signals
from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import Infeasible, NotAtBoundary, PlanError, TransitionFailed, UnitLost
from nereus_core.gate import Gate
from nereus_core.layout import Layout
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, OpId, Split
from nereus_core.sim.models import TINY
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, FLOAT32, Job, grpo

pytestmark = pytest.mark.real

CLUSTER = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
JOB = Job(grpo(), {"actor": TINY, "ref": TINY}, CLUSTER, 8, 8, 8, FLOAT32)
ONE, TP2 = Layout(1), Layout(2)


def unit(serial, layout, first):
    devices = CLUSTER.devices[first : first + layout.tp]
    return Unit(UnitId(ACTOR_TRAIN, serial), layout, devices)


def split(serial, first):
    into = (unit(10 + first, ONE, first), unit(11 + first, ONE, first + 1))
    return Split(OpId(f"split {serial}"), UnitId(ACTOR_TRAIN, serial), into)


A, B = split(0, 0), split(1, 2)


class Stopped(Exception):
    """Who watches ends a primitive."""


class Group:
    """What a group of the actor holds: a number, which is gone when its memory is freed."""

    def __init__(self, monkeypatch):
        self.holds, self.seated = 7, []
        monkeypatch.setattr(groups, "hand_out", self.hand_out)
        monkeypatch.setattr(groups, "vacate", self.vacate)
        monkeypatch.setattr(groups, "seat", self.seat)
        monkeypatch.setattr("nereus_adapters.openrlhf.engines.start_missing", lambda running: None)
        monkeypatch.setattr("nereus_adapters.openrlhf.engines.await_all", lambda running: None)
        monkeypatch.setattr("nereus_adapters.openrlhf.engines.tie", lambda running: None)

    def hand_out(self, running, stage):
        assert self.holds is not None
        return Parked((), {"number": str(self.holds)})

    def vacate(self, running, stage):
        self.holds = None

    def seat(self, running, stage, parked):
        self.holds = int(parked.digests["number"])
        self.seated.append([str(unit.id) for unit in running.alive.of(stage)])
        return 0


@pytest.fixture
def group(monkeypatch):
    return Group(monkeypatch)


@pytest.fixture
def adapter(group):
    attributes = ("critic_model_group", "reference_model_group", "reward_model_group")
    args = SimpleNamespace(
        ds=SimpleNamespace(zero_stage=2),
        train=SimpleNamespace(
            batch_size=8, micro_batch_size=1, colocate_all=False, async_enable=False
        ),
        vllm=SimpleNamespace(sync_backend="nccl"),
        rollout=SimpleNamespace(micro_batch_size=1),
    )
    trainer = SimpleNamespace(actor_model_group=group, args=args, **dict.fromkeys(attributes))
    running = Running(trainer, BackendSection(warm_engines=0), Gate(10.0), Signals())
    running.bundles = {device: SimpleNamespace(pg="of the job") for device in CLUSTER.devices}
    running.alive = UnitMap([unit(0, TP2, 0), unit(1, TP2, 2)])
    supply = SimpleNamespace(
        gone=frozenset, leaving=frozenset, asked_back=frozenset, draining_nodes=frozenset
    )
    running.ranks = {(ACTOR_TRAIN, device): str(device) for device in CLUSTER.devices}
    return OpenRLHFAdapter(running, JOB, "0.11.0", supply)


def at_boundary(adapter):
    return adapter.boundary([ACTOR_TRAIN], timeout_s=10.0)


@pytest.mark.parametrize("phase", [Phase.VERIFY, Phase.COMMIT])
def test_one_primitive_that_is_not_committed_leaves_another_its_state(adapter, group, phase):
    both_parked, a_has_ended = threading.Barrier(2, timeout=10), threading.Event()

    def hook(op, at):
        if at is Phase.VERIFY:
            both_parked.wait()
        if op is A and at is phase:
            raise Stopped
        if op is B and at is Phase.COMMIT:
            assert a_has_ended.wait(10)

    def perform_a():
        with pytest.raises(Stopped):
            adapter.perform(A)
        a_has_ended.set()

    adapter.watch(hook)
    with at_boundary(adapter):
        thread = threading.Thread(target=perform_a)
        thread.start()
        adapter.perform(B)
        thread.join(10)
        assert group.holds is None
        assert A.parent in adapter.units()
        assert B.parent not in adapter.units()
    assert group.holds == 7
    # units of two layouts are no group of OpenRLHF: what was there is back
    assert group.seated == [[str(A.parent), str(B.parent)]]
    assert list(adapter.units()) == [A.parent, B.parent]


def test_a_copy_of_a_primitive_that_failed_is_not_taken_for_the_state_of_a_later_step(
    adapter, group
):
    def hook(op, at):
        if op is A and at is Phase.VERIFY:
            raise Stopped

    adapter.watch(hook)
    with at_boundary(adapter), pytest.raises(Stopped):
        adapter.perform(A)
    group.holds = 8  # a step
    with at_boundary(adapter):
        adapter.perform(B)
    assert group.holds == 8


def test_units_of_two_layouts_are_refused_before_a_group_is_built(adapter, group):
    with at_boundary(adapter):
        adapter.perform(A)
        with pytest.raises(TransitionFailed, match="have one layout"):
            adapter._linking.link()
        assert group.seated == [[str(A.parent), str(B.parent)]]
    assert list(adapter.units()) == [A.parent, B.parent]


def test_a_primitive_that_outlives_its_boundary_changes_nothing_and_takes_no_copy(adapter, group):
    stands, go_on, raised = threading.Event(), threading.Event(), []

    def hook(op, at):
        if op is A and at is Phase.COMMIT:
            stands.set()
            assert go_on.wait(10)

    def perform_a():
        with pytest.raises(NotAtBoundary, match="has ended") as info:
            adapter.perform(A)
        raised.append(info.value)

    adapter.watch(hook)
    with at_boundary(adapter):
        thread = threading.Thread(target=perform_a)
        thread.start()
        assert stands.wait(10)
    group.holds = 8  # a step
    with at_boundary(adapter):
        adapter._linking.park(B, adapter._linking.boundary)
        go_on.set()
        thread.join(10)
        assert raised
        assert A.parent in adapter.units()
        adapter.perform(B)
    assert group.holds == 8


def test_a_look_between_parking_and_committing_costs_no_state(adapter, group):
    def hook(op, at):
        if at is Phase.COMMIT and op is A:
            adapter._linking.link()

    adapter.watch(hook)
    with at_boundary(adapter):
        adapter.perform(A)
        adapter.perform(B)
    assert group.holds == 7
    assert sorted(group.seated[-1]) == sorted(str(u.id) for u in (*A.into, *B.into))


def test_engines_that_no_rank_can_give_weights_are_refused_before_any_is_built(adapter, group):
    running = adapter._running
    running.args.train.colocate_all = True
    engine = Unit(UnitId(ACTOR_GENERATE, 0), ONE, CLUSTER.devices[:1])
    running.alive = UnitMap([unit(0, TP2, 0), engine])
    refuse_unbuildable(running, JOB)
    elsewhere = Unit(UnitId(ACTOR_GENERATE, 1), ONE, CLUSTER.devices[2:3])
    running.alive = UnitMap([unit(0, TP2, 0), engine, elsewhere])
    with pytest.raises(Infeasible, match="from the actor's ranks on its own GPUs"):
        refuse_unbuildable(running, JOB)
    running.args.vllm.sync_backend = "gloo"
    refuse_unbuildable(running, JOB)


def test_a_rank_without_a_unit_ends_when_its_device_is_asked_back(adapter, monkeypatch):
    """Ray keeps its place, also where the rank was in no placement group."""
    ended, asked, running = [], [], adapter._running
    monkeypatch.setattr(groups.ray, "kill", ended.append)
    monkeypatch.setattr(groups, "placement_group", lambda bundles: asked.extend(bundles) or "new")
    running.bundles[CLUSTER.devices[2]] = Bundle(None, 0)
    running.alive = running.alive.replace([B.parent], ())
    adapter._supply.leaving = lambda: frozenset(CLUSTER.devices[1:3])
    assert adapter.observe().draining == frozenset(CLUSTER.devices[1:3])
    assert ended == [str(CLUSTER.devices[2])]
    assert asked == [{"GPU": 1, "CPU": 1, f"node:{CLUSTER.devices[2].node}": 0.001}]
    assert running.bundles[CLUSTER.devices[2]].pg == "new"
    adapter.observe()
    assert len(ended) == 1


def test_engines_of_a_lost_node_are_dropped_unasked_and_the_others_are_tied(adapter, monkeypatch):
    killed, tied, running = [], [], adapter._running
    engines = "nereus_adapters.openrlhf.engines"
    monkeypatch.setattr(f"{engines}.ray.kill", killed.append)
    monkeypatch.setattr(f"{engines}.tie", lambda now: tied.append(list(now.engines.values())))
    pair = [Unit(UnitId(ACTOR_GENERATE, n), ONE, (CLUSTER.devices[n],)) for n in (0, 1)]
    (train,) = made = [unit(0, TP2, 2)]
    running.alive = UnitMap([*made, *pair])
    adapter._linking._linked = running.alive
    running.engines = {one.id: f"engine {one.id.serial}" for one in pair}
    adapter._supply.gone = lambda: frozenset(CLUSTER.devices[:1])

    assert pair[0].id not in adapter.units()
    with adapter.boundary([ACTOR_TRAIN, ACTOR_GENERATE], timeout_s=10.0):
        assert killed == ["engine 0"]
    assert tied == [["engine 1"]]
    assert list(running.alive) == [pair[1].id, train.id]


def test_a_lost_rank_of_a_group_that_trains_is_named(adapter, group):
    adapter._supply.gone = lambda: frozenset(CLUSTER.devices[:1])
    held = Plan({ACTOR_TRAIN: Placement(TP2, (CLUSTER.devices[:2], CLUSTER.devices[2:]))})
    with at_boundary(adapter):
        with pytest.raises(UnitLost, match=str(A.parent)):
            adapter.perform(A)
        with pytest.raises(UnitLost, match=str(B.parent)):
            adapter.perform(Destroy(OpId("end"), B.parent))
        with pytest.raises(PlanError):
            adapter.relink(held)


def test_the_harness_counts_what_a_rank_that_left_still_holds_once_per_storage():
    rank, before = SimpleNamespace(), state_bytes(SimpleNamespace())
    kept = torch.zeros(1000)
    held = [kept, kept[10:]]
    assert state_bytes(rank) - before == 4000
    del kept, held
    assert state_bytes(rank) == before
