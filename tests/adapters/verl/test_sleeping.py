"""Replicas that sleep out of service: woken for the layout that comes back, and counted."""

import pytest
from verl_cpu.alike import gaps
from verl_cpu.job import COMPARED

from nereus_adapters.verl.facts import WorkerFacts
from nereus_adapters.verl.reading import cluster_of
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


def test_no_state_moves(job):
    assert all(e.moved_bytes == 0 for e in job.events if isinstance(e, PrimitiveFinished))


def test_what_slept_has_the_weights_of_the_step(job, jobs, tolerance):
    """A server that was woken holds nothing until it is given weights (NaN, in `verl_cpu`)."""
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    fixed, limits = jobs("fixed-grpo"), tolerance("grpo")
    found = gaps(fixed.ran.metrics[:COMPARED], job.ran.metrics[:COMPARED])
    strayed = {name: (gap, limits[name]) for name, gap in found.items() if gap > limits[name]}
    assert not strayed, f"(difference, allowed): {strayed}"


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

    def counted(sleepers, **chosen):
        settings = VerlSettings(**chosen)
        devices = [Device("node0", 0)]
        found = cluster_of(worker, devices, settings, sleepers, weights_bytes=14 << 30)
        return found.device_spec.memory_bytes

    assert counted(1) == counted(0) - ACCELERATOR_BYTES
    assert counted(3, sleeping_bytes=2 << 30) == counted(0) - (6 << 30)
    with pytest.raises(ConfigError, match="sleeping_replicas"):
        counted(80)


def test_what_sleeps_is_counted():
    assert asleep_bytes(None, 14 << 30, on_cpu=False) == ACCELERATOR_BYTES
    assert asleep_bytes(None, 14 << 30, on_cpu=True) == 14 << 30  # nothing is released there
    assert asleep_bytes(0, 14 << 30, on_cpu=True) == 0
