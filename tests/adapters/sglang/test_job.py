"""A job whose generate stage changes: the tokens are Hugging Face's after every primitive."""

import pytest
from rollout_job import ONE, PP2, TP2, Running
from rollout_job import harness as harness

from nereus_adapters.rollout.ports import EngineError
from nereus_adapters.rollout.sglang.harness import new_harness
from nereus_core.primitives import Destroy, Extend, Merge, Split

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def launcher(engines):
    """Launches jobs with a trainer on engines of the session's stem."""
    made = new_harness(engines.pool)
    yield made
    made.close()


def alive(running):
    """Return the engines alive on the job's first two devices, by the processes of their ranks."""
    factory = running.harness.behind.factory
    return {engine.pids for device in running.devices[:2] for engine in factory.on(device)}


def test_greedy_tokens_equal_hugging_face_after_every_primitive(harness):
    running = Running(harness)
    a, b = running.devices[:2]
    running.harness.step()
    running.require_right_tokens()
    running.perform(Merge, tuple(u.id for u in running.own), running.unit(TP2, a, b))
    running.require_right_tokens()
    running.perform(Split, running.own[0].id, (running.unit(PP2, a, b),))
    running.require_right_tokens()
    running.perform(Split, running.own[0].id, (running.unit(ONE, a), running.unit(ONE, b)))
    running.harness.step()
    running.require_right_tokens()
    running.perform(Destroy, running.own[0].id)
    running.require_right_tokens()
    running.perform(Extend, (running.own[0].id,), running.unit(ONE, a))
    running.require_right_tokens()
    assert len(alive(running)) == 2


def test_signals_of_each_replica_are_observed(harness):
    running = Running(harness)
    running.require_signals()


def test_old_engines_end_once_new_ones_serve(harness, monkeypatch):
    running = Running(harness)
    a, b = running.devices[:2]
    old, factory, seen = alive(running), harness.behind.factory, []
    create = factory.create

    def watched(name, layout, devices):
        seen.append(alive(running))
        return create(name, layout, devices)

    with monkeypatch.context() as patch:
        patch.setattr(factory, "create", watched)
        running.perform(Merge, tuple(u.id for u in running.own), running.unit(TP2, a, b))
    assert seen == [old]
    assert len(alive(running)) == 1
    assert not alive(running) & old
    running.require_right_tokens()


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "in their place"])
def test_engines_that_do_not_come_up_leave_the_old_ones(harness, monkeypatch, beside):
    running = Running(harness, TP2)
    a, b = running.devices[:2]
    old, units, factory = alive(running), running.own, harness.behind.factory
    create = factory.create

    def refuse(name, layout, devices):
        if devices == (b,):
            raise EngineError(name, "come up", "told to")
        return create(name, layout, devices)

    with monkeypatch.context() as patch:
        patch.setattr(factory, "create", refuse)
        patch.setattr(factory, "_beside", beside)
        with pytest.raises(EngineError, match="told to"):
            running.perform(Split, units[0].id, (running.unit(ONE, a), running.unit(ONE, b)))
    assert running.own == units
    assert (alive(running) == old) == beside  # the same engine, or another like it
    assert len(alive(running)) == 1
    running.require_right_tokens()
