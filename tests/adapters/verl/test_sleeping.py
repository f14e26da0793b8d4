"""Replicas that sleep out of service: woken for the layout that comes back, and counted."""

from types import SimpleNamespace

import pytest

from nereus_adapters.verl.facts import WorkerFacts
from nereus_adapters.verl.reading import asleep, cluster_of
from nereus_adapters.verl.settings import VerlSettings
from nereus_adapters.verl.sleeping import ACCELERATOR_BYTES, Sleeper, Sleepers, asleep_bytes
from nereus_core.cluster import Device
from nereus_core.errors import ConfigError
from nereus_core.events import PrimitiveFinished, TransitionFinished

pytestmark = pytest.mark.real

PAIR, WHOLE = {"actor/generate": ["tp1pp1", 2]}, {"actor/generate": ["tp2pp1", 2]}
PLANS = {1: WHOLE, 2: PAIR, 3: WHOLE, 4: PAIR}
"""A replica of TP1 is killed in its sleep before the last."""


@pytest.fixture(scope="module")
def job(launch):
    found = launch(
        "asleep",
        "+nereus.timeouts.step_s=300",
        "+nereus.timeouts.primitive_s=300",
        "+nereus.policy.admission=never",
        "actor_rollout_ref.rollout.free_cache_engine=True",
        plans=PLANS,
        env={"VERL_CPU_FAULT": "kill-sleeper:4"},
    )
    assert found.ran.returncode == 0, found.ran.output[-4000:]
    return found


def test_a_layout_that_comes_back_starts_no_process(job):
    first, back, again, _ = job.forced
    assert len(first["served"]) == 2
    assert not set(first["serve"]) & set(first["served"])
    assert back["serve"] == first["served"]
    assert again["serve"] == first["serve"]


def test_a_replica_that_died_in_its_sleep_is_started_anew(job):
    last = job.forced[-1]
    original = set(job.forced[0]["served"])
    assert len(set(last["serve"]) & original) == 1
    assert len(set(last["serve"])) == 2
    outcomes = [e.outcome for e in job.events if isinstance(e, TransitionFinished)]
    assert outcomes == ["done"] * 4


def test_waking_takes_a_fraction_of_a_start(job):
    started, *woken, _ = [record["seconds"] for record in job.forced]
    assert max(woken) < started
    assert all(e.moved_bytes == 0 for e in job.events if isinstance(e, PrimitiveFinished))


def test_what_slept_has_the_weights_of_the_step(job, jobs):
    """A server that was woken holds nothing until it is given weights (NaN, in `verl_cpu`)."""
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    fixed = jobs("fixed-grpo")
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
        assert job.series(name) == pytest.approx(fixed.series(name), rel=1e-5, abs=1e-6), name


def test_the_oldest_make_room():
    sleepers = Sleepers(1)
    pair = [Sleeper("left", 1, ("a",)), Sleeper("right", 1, ("b",))]
    assert [sleepers.keep(sleeper) for sleeper in pair] == [[], []]
    assert sleepers.keep(Sleeper("whole", 2, ("a", "b"))) == ["left", "right"]
    assert sleepers.take(1, ["a"]) is None
    assert sleepers.take(2, ["b", "a"]) is None
    assert sleepers.take(2, ["a", "b"]) == "whole"
    assert sleepers.take(2, ["a", "b"]) is None


def test_nothing_sleeps_where_none_may():
    assert Sleepers(0).keep(Sleeper("whole", 2, ("a", "b"))) == ["whole"]


def test_whoever_sleeps_on_a_process_that_goes_is_given_up():
    sleepers = Sleepers(2)
    for sleeper in (Sleeper("whole", 2, ("a", "b")), Sleeper("right", 1, ("b",))):
        assert sleepers.keep(sleeper) == []
    assert sleepers.leave(["a"]) == ["whole"]
    assert sleepers.leave() == ["right"]


def test_plans_count_on_what_sleepers_leave():
    worker = WorkerFacts("node0", 0, "NVIDIA H100 80GB HBM3", 80 << 30, ())
    rollout = SimpleNamespace(free_cache_engine=True)
    resident = SimpleNamespace(free_cache_engine=False)  # they would sleep with all their weights
    usual, more = VerlSettings(), VerlSettings(sleeping_replicas=3, sleeping_bytes=2 << 30)

    def counted(settings, rollout=rollout):
        sleepers = asleep(rollout, settings)
        devices = [Device("node0", 0)]
        found = cluster_of(worker, devices, settings, sleepers, weights_bytes=14 << 30)
        return found.device_spec.memory_bytes

    whole = counted(VerlSettings(sleeping_replicas=0))
    assert counted(usual) == whole - ACCELERATOR_BYTES
    assert counted(more) == whole - (6 << 30)
    assert counted(more, resident) == whole
    with pytest.raises(ConfigError, match="sleeping_replicas"):
        counted(VerlSettings(sleeping_replicas=80))


def test_what_sleeps_is_counted():
    assert asleep_bytes(None, 14 << 30, on_cpu=False) == ACCELERATOR_BYTES
    assert asleep_bytes(None, 14 << 30, on_cpu=True) == 14 << 30  # nothing is released there
    assert asleep_bytes(0, 14 << 30, on_cpu=True) == 0
