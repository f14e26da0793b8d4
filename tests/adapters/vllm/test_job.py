"""A job whose generate stage changes: the tokens are Hugging Face's after every primitive."""

import itertools
import os
import signal

import pytest
import torch
from vllm_cases import ONE, PP2, TP2, prompts

from nereus_core.errors import UnitLost
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, Extend, Merge, Split
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

pytestmark = pytest.mark.real

_serials = itertools.count(100)


class Running:
    """A job launched with engines on the first two seats, training on the third."""

    def __init__(self, harness, layout=ONE):
        self.harness, job = harness, harness.job()
        self.devices = job.cluster.healthy
        plan = {
            ACTOR_GENERATE: Placement.packed(layout, self.devices[:2]),
            ACTOR_TRAIN: Placement(ONE, (self.devices[2:3],)),
            REF_INFER: Placement(ONE, (self.devices[3:],)),
        }
        self.adapter = harness.launch(job, Plan(plan))
        self.job = harness.running_job

    @property
    def own(self):
        return self.adapter.units().of(ACTOR_GENERATE)

    def unit(self, layout, *devices):
        return Unit(UnitId(ACTOR_GENERATE, next(_serials)), layout, devices)

    def perform(self, kind, *what):
        op = kind(f"op{next(_serials)}", *what)
        with self.adapter.boundary([ACTOR_GENERATE], timeout_s=60):
            receipt = getattr(self.adapter, kind.__name__.lower())(op)
            self.adapter.relink(Plan.of_units(self.adapter.units()))
        return receipt

    def pid(self, index):
        return self.harness.behind.factory.pool.seat(self.devices[index]).pid

    def require_right_tokens(self):
        """Ask for greedy tokens and compare them with the trainer's model's."""
        asked = prompts(4, 24)
        found = self.job.fleet.generate(asked)
        model = self.harness.trainer._models["actor"]
        for prompt, completion in zip(asked, found, strict=True):
            ids = torch.tensor([prompt.tokens])
            with torch.no_grad():
                whole = model.generate(
                    ids,
                    do_sample=False,
                    max_new_tokens=24,
                    min_new_tokens=24,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            assert completion.tokens == tuple(whole[0, ids.shape[1] :].tolist())


def test_greedy_tokens_equal_hugging_face_after_every_primitive(harness):
    running = Running(harness)
    a, b = running.devices[:2]
    pids = [running.pid(0), running.pid(1)]
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
    assert [running.pid(0), running.pid(1)] == pids


def test_a_seat_killed_in_a_transition_is_replaced_and_the_transition_ends(harness):
    running = Running(harness)
    a, b = running.devices[:2]

    def kill(op, phase, units):
        if phase is Phase.COMMIT:
            os.kill(running.pid(1), signal.SIGKILL)

    running.adapter.fault = kill
    running.perform(Merge, tuple(u.id for u in running.own), running.unit(TP2, a, b))
    running.adapter.fault = None
    running.require_right_tokens()
    running.harness.step()
    running.require_right_tokens()


def test_a_device_lost_in_a_transition_leaves_what_is_intact(harness):
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


def test_an_engine_killed_while_generating_is_rebuilt_and_every_token_comes(harness):
    running = Running(harness, TP2)
    asked = prompts(6, 40)
    futures = [running.job.fleet.submit(p) for p in asked]
    os.kill(running.pid(0), signal.SIGKILL)
    assert all(len(f.result(120).tokens) == 40 for f in futures)
    assert running.job.rebuilt == 1
    running.require_right_tokens()
    running.harness.step()


def test_an_engine_lost_at_an_update_is_rebuilt_and_the_other_serves(harness):
    running = Running(harness)
    running.harness.step()
    os.kill(running.pid(1), signal.SIGKILL)
    running.harness.step()
    assert running.job.rebuilt == 1
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
    assert running.job.rebuilt == 0
    assert [running.job.version_of(u.id) for u in running.own] == [1, 1]
    running.require_right_tokens()


def test_signals_of_each_replica_are_observed(harness):
    running = Running(harness)
    running.harness.step()
    metrics = running.adapter.observe().metrics
    for unit in running.own:
        assert metrics[f"{unit.id}/running"] >= 1
        assert metrics[f"{unit.id}/tokens_per_s"] > 0
        assert metrics[f"{unit.id}/first_token_s"] > 0
        assert 0 < metrics[f"{unit.id}/kv_cache_use"] <= 1
        assert metrics[f"{unit.id}/preemptions"] == 0
