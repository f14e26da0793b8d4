"""Several engines: who gets which prompt, and that none loses or repeats a token when one goes."""

import os
import signal
from contextlib import contextmanager

import pytest
from vllm_cases import DEVICES, ONE, STEP_S, prompts

from nereus_adapters.rollout.fleet import Fleet
from nereus_adapters.rollout.ports import Finish, Prompt, Sampling
from nereus_core.errors import WaitTimeout
from nereus_core.units import UnitId
from nereus_core.workload import ACTOR_GENERATE

pytestmark = pytest.mark.real

FIRST, SECOND = UnitId(ACTOR_GENERATE, 0), UnitId(ACTOR_GENERATE, 1)


both = pytest.mark.parametrize("pair", ["step", "async"], indirect=True)
"""Engines stepped by seats, and by vLLM's AsyncLLM."""


@pytest.fixture
def pair(request, start, weights, fronts):
    """Two engines of one version in a fleet."""
    published, factory = weights.publish(1), fronts[getattr(request, "param", "step")]
    fleet = Fleet(wait_s=60)
    for unit, device in zip((FIRST, SECOND), DEVICES, strict=True):
        fleet.add(unit, start(ONE, (device,), published, factory))
    fleet.route([FIRST, SECOND])
    fleet.serve_version(1)
    return fleet


@contextmanager
def in_flight(fleet, weights, count=8, max_tokens=100):
    """Have prompts under way, some tokens of each drawn; at the end all of them must be right."""
    for engine in fleet.engines().values():
        engine.rpc("nereus_slow", step_s=STEP_S)
    asked = prompts(count, max_tokens)
    futures = [fleet.submit(p) for p in asked]
    soon = Sampling(4, temperature=0.0)
    for each in [fleet.submit(Prompt(f"soon {i}", (1, 5, 9), soon)) for i in range(2)]:
        each.result(60)
    yield
    found = [f.result(60) for f in futures]
    for prompt, completion in zip(asked, found, strict=True):
        assert completion.tokens == weights.greedy(prompt.tokens, max_tokens)[0]
        assert len(completion.logprobs) == max_tokens
        assert sum(span.num_tokens for span in completion.spans) == max_tokens
        assert completion.finish is Finish.LENGTH


def test_prompts_are_shared_by_load(pair):
    pair.generate(prompts(8))
    signals = pair.signals()
    assert [signals[u].generated_tokens for u in (FIRST, SECOND)] == [4 * 24, 4 * 24]
    assert pair.served() == {FIRST: 1, SECOND: 1}


def test_only_engines_with_the_served_version_get_prompts(pair, weights):
    weights.change(seed=8)
    published = weights.publish(2)
    pair.engine(SECOND).update_weights(2, published.manifest(ONE))
    pair.generate(prompts(4))
    assert pair.served() == {FIRST: 1}
    pair.serve_version(2)
    found = pair.generate(prompts(4))
    assert pair.served() == {SECOND: 2}
    assert [f.tokens for f in found] == [weights.greedy(p.tokens, 24)[0] for p in prompts(4)]


def test_prompts_wait_while_nobody_is_in_routing(pair, weights):
    pair.route([])
    future = pair.submit(prompts(1)[0])
    assert not future.done()
    pair.route([SECOND])
    assert future.result(60).tokens == weights.greedy(prompts(1)[0].tokens, 24)[0]


def test_a_response_that_nobody_gives_is_named(pair):
    pair.route([])
    pair._wait_s = 0.2
    with pytest.raises(WaitTimeout, match=r"the response to p0 from no engine"):
        pair.generate(prompts(1))


@both
def test_removing_an_engine_moves_its_prompts(pair, weights):
    with in_flight(pair, weights):
        pair.remove(FIRST).close()
    assert pair.moved >= 1


@both
def test_draining_an_engine_moves_nothing(pair, weights):
    with in_flight(pair, weights):
        pair.remove(FIRST, drain_s=60).close()
    assert pair.moved == 0


@both
def test_interrupting_all_and_going_on(pair, weights):
    with in_flight(pair, weights):
        pair.interrupt()
        pair.route([FIRST, SECOND])
    assert pair.moved >= 1


def test_an_engine_killed_while_generating_loses_nothing(pair, weights, factory):
    lost = []
    pair.on_lost = lost.append
    with in_flight(pair, weights):
        os.kill(factory.pool.seat(DEVICES[0]).pid, signal.SIGKILL)
    assert set(lost) == {FIRST}
