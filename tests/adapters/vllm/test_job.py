"""A job whose generate stage changes: the tokens are Hugging Face's after every primitive."""

import itertools
import os
import signal

import pytest
from rollout_job import ONE, PP2, TP2, Running, prompts

from nereus_adapters.rollout.ports import EngineError
from nereus_core.errors import UnitLost
from nereus_core.phases import Phase
from nereus_core.primitives import Destroy, Extend, Merge, Split

pytestmark = pytest.mark.real


def pid(running, index):
    """Return the process of a seat."""
    return running.harness.behind.factory.pool.seat(running.devices[index]).pid


def test_greedy_tokens_equal_hugging_face_after_every_primitive(harness):
    running = Running(harness)
    a, b = running.devices[:2]
    pids = [pid(running, 0), pid(running, 1)]
    running.harness.step()
    running.require_right_tokens()
    running.perform(Merge, tuple(u.id for u in running.own), running.unit(TP2, a, b))
    running.require_right_tokens()
    running.perform(Split, running.own[0].id, (running.unit(PP2, a, b),))
    running.require_right_tokens()
    children = (running.unit(ONE, a), running.unit(ONE, b))
    running.perform(Split, running.own[0].id, children)
    running.require_right_tokens()
    running.harness.step()
    running.require_right_tokens()
    running.perform(Destroy, running.own[0].id)
    running.require_right_tokens()
    running.perform(Extend, (running.own[0].id,), running.unit(ONE, a))
    running.require_right_tokens()
    assert [pid(running, 0), pid(running, 1)] == pids


def test_a_seat_killed_in_a_transition_is_replaced_and_the_transition_ends(harness):
    running = Running(harness)
    a, b = running.devices[:2]

    def kill(op, phase, units):
        if phase is Phase.COMMIT:
            os.kill(pid(running, 1), signal.SIGKILL)

    running.adapter.fault = kill
    running.perform(Merge, tuple(u.id for u in running.own), running.unit(TP2, a, b))
    running.adapter.fault = None
    running.require_right_tokens()
    running.harness.step()
    running.require_right_tokens()


def test_a_device_lost_in_a_transition_leaves_what_is_intact(harness, monkeypatch):
    running = Running(harness)
    a, b = running.devices[:2]
    units = running.own

    def fail(op, phase, units):
        if phase is Phase.COMMIT:
            running.harness.fail(b)

    running.adapter.fault = fail
    with pytest.raises(UnitLost, match="lost actor/generate#1"):
        running.perform(Merge, tuple(u.id for u in units), running.unit(TP2, a, b))
    assert running.own == units[:1]
    running.require_right_tokens()


def test_a_device_lost_as_new_engines_start_leaves_what_is_intact(harness, monkeypatch):
    running = Running(harness)
    a, b = running.devices[:2]
    units, factory = running.own, harness.behind.factory
    create = factory.create

    def fail(name, layout, devices):
        if layout == TP2:
            harness.fail(b)
            raise EngineError(name, "start", "told to")
        return create(name, layout, devices)

    with monkeypatch.context() as patch:
        patch.setattr(factory, "create", fail)
        with pytest.raises(UnitLost, match="lost actor/generate#1"):
            running.perform(Merge, tuple(u.id for u in units), running.unit(TP2, a, b))
    assert running.own == units[:1]
    running.require_right_tokens()


def test_an_engine_killed_while_generating_is_rebuilt_and_every_token_comes(harness):
    running = Running(harness, TP2)
    asked = prompts(6, 40)
    futures = [running.job.fleet.submit(p) for p in asked]
    os.kill(pid(running, 0), signal.SIGKILL)
    assert all(len(f.result(120).tokens) == 40 for f in futures)
    assert running.job.rebuilds.count == 1
    running.require_right_tokens()
    running.harness.step()


def test_an_engine_lost_at_an_update_is_rebuilt_and_the_other_serves(harness):
    running = Running(harness)
    running.harness.step()
    os.kill(pid(running, 1), signal.SIGKILL)
    running.harness.step()
    assert running.job.rebuilds.count == 1
    assert [running.job.version_of(u.id) for u in running.own] == [2, 2]
    running.require_right_tokens()


def test_weights_garbled_on_their_way_are_published_again(harness):
    running = Running(harness)
    trainer = harness.trainer
    publish, count = trainer.publish, itertools.count()

    def spoiled_once(store):
        publish(store)
        if next(count) == 0:
            harness.corrupt()

    trainer.publish = spoiled_once
    running.harness.step()
    assert next(count) == 2
    assert running.job.rebuilds.count == 0
    assert [running.job.version_of(u.id) for u in running.own] == [1, 1]
    running.require_right_tokens()


def test_signals_of_each_replica_are_observed(harness):
    running = Running(harness)
    running.require_signals()


def test_engines_that_do_not_come_up_leave_the_old_ones(harness, monkeypatch):
    running = Running(harness)
    a, b = running.devices[:2]
    units, factory = running.own, harness.behind.factory
    create = factory.create

    def refuse(name, layout, devices):
        if layout == TP2:
            raise EngineError(name, "start", "told to")
        return create(name, layout, devices)

    with monkeypatch.context() as patch:
        patch.setattr(factory, "create", refuse)
        with pytest.raises(EngineError, match="told to"):
            running.perform(Merge, tuple(u.id for u in units), running.unit(TP2, a, b))
    assert running.own == units
    running.require_right_tokens()
    running.perform(Merge, tuple(u.id for u in units), running.unit(TP2, a, b))
    running.require_right_tokens()
