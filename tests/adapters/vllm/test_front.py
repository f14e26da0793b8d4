"""Engines behind vLLM's AsyncLLM: the same tokens on the same seats, whatever is killed."""

import os
import signal

import psutil
import pytest
from vllm_cases import DEVICES, ONE, PP2, STEP_S, TP2, prompts, respond

from nereus_adapters.rollout.ports import EngineError, Finish, Prompt, Sampling
from nereus_adapters.rollout.vllm.harness import CpuFactory, settings
from nereus_core.errors import ConfigError

pytestmark = pytest.mark.real

LONG = 100
"""Tokens that a slow engine is still drawing when the driver has heard of the first."""


@pytest.fixture
def begin(start, fronts):
    """Start engines with a front."""
    return lambda layout, published: start(layout, published=published, using=fronts["async"])


def core(engine):
    """Return the process of an engine's scheduler: the front's only child that leads no other."""
    return psutil.Process(engine.processes[0].pid).children()[0]


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_greedy_tokens_equal_hugging_face_on_seats_that_stay(factory, begin, weights, layout):
    factory.pool.start(DEVICES)  # a test before may have killed one
    seats = {d: factory.pool.seat(d).pid for d in DEVICES}
    engine = begin(layout, weights.publish(1))
    front = psutil.Process(engine.processes[0].pid)
    for version in (1, 2):
        if version == 2:
            weights.change(seed=5)
            engine.update_weights(2, weights.publish(2).manifest(layout))
        for prompt, found in zip(prompts(4), respond(engine, prompts(4)), strict=True):
            assert found.tokens == weights.greedy(prompt.tokens, 24)[0]
            assert len(found.logprobs) == 24
            assert [(s.version, s.num_tokens) for s in found.spans] == [(version, 24)]
    seen = engine.signals()
    assert seen.generated_tokens == 2 * 4 * 24
    assert seen.running > 1
    assert 0 < seen.first_token_s < seen.busy_s
    assert seen.tokens_per_s > 0
    assert 0 < seen.kv_cache_use <= 1
    assert len(seen.peak_bytes) == layout.num_devices
    below = [front, *front.children(recursive=True)]
    engine.close()
    assert not psutil.wait_procs(below, 10)[1]
    assert {d: factory.pool.seat(d).pid for d in DEVICES} == seats
    assert [factory.pool.seat(d).call("memory", 60)[1] for d in DEVICES] == [0, 0]


def test_an_interrupted_response_goes_on_without_a_token_lost_or_repeated(begin, weights):
    engine = begin(ONE, weights.publish(1))
    engine.rpc("nereus_slow", step_s=STEP_S)
    asked = prompts(6, LONG)
    wanted = [weights.greedy(p.tokens, LONG)[0] for p in asked]
    futures = [engine.submit(p) for p in asked]
    engine.submit(Prompt("soon done", (1, 5, 9), Sampling(4, temperature=0.0))).result(60)
    engine.interrupt()
    parts = [f.result(10) for f in futures]
    assert {p.finish for p in parts} == {Finish.INTERRUPTED}
    assert all(0 < len(p.tokens) < LONG for p in parts)
    rest = respond(engine, [p.after(part.tokens) for p, part in zip(asked, parts, strict=True)])
    whole = [part.then(r) for part, r in zip(parts, rest, strict=True)]
    assert [w.tokens for w in whole] == wanted
    assert [len(w.logprobs) for w in whole] == [LONG] * 6


def test_ranks_that_have_no_tokens_to_tell_do_not_hold_up_the_others(begin, weights):
    engine = begin(TP2, weights.publish(1))
    for prompt in prompts(4, LONG):  # more steps than a socket takes answers
        assert respond(engine, [prompt])[0].tokens == weights.greedy(prompt.tokens, LONG)[0]


def test_an_interrupt_that_follows_a_submit_at_once_leaves_nothing_behind(begin, weights):
    engine = begin(ONE, weights.publish(1))
    engine.rpc("nereus_slow", step_s=STEP_S)
    futures = [engine.submit(p) for p in prompts(6, LONG)]
    engine.interrupt()
    assert {f.result(10).finish for f in futures} == {Finish.INTERRUPTED}
    weights.change(seed=5)
    engine.update_weights(2, weights.publish(2).manifest(ONE))
    engine.signals()
    for prompt, found in zip(prompts(2), respond(engine, prompts(2)), strict=True):
        assert found.tokens == weights.greedy(prompt.tokens, 24)[0]
    seen = engine.signals()
    assert seen.running == 2  # and none of those before
    assert seen.generated_tokens == 2 * 24


def test_a_prompt_too_long_is_refused_and_the_others_go_on(begin, weights):
    engine = begin(ONE, weights.publish(1))
    good = engine.submit(prompts(1)[0])
    with pytest.raises(EngineError, match="respond to long"):
        engine.submit(Prompt("long", tuple([5] * 130), Sampling(8))).result(60)
    assert len(good.result(60).tokens) == 24


@pytest.mark.parametrize("who", ["front", "core"])
def test_whatever_is_killed_loses_the_engine_and_no_token(begin, weights, who):
    published = weights.publish(1)
    engine = begin(TP2, published)
    engine.rpc("nereus_slow", step_s=STEP_S)
    asked = prompts(6, LONG)
    wanted = [weights.greedy(p.tokens, LONG)[0] for p in asked]
    futures = [engine.submit(p) for p in asked]
    engine.submit(Prompt("soon done", (1, 5, 9), Sampling(2, temperature=0.0))).result(60)
    os.kill(engine.processes[0].pid if who == "front" else core(engine).pid, signal.SIGKILL)
    parts = [f.result(60) for f in futures]
    assert not engine.alive
    engine.close()
    again = begin(TP2, published)
    assert Finish.INTERRUPTED in {part.finish for part in parts}
    left = [i for i, part in enumerate(parts) if part.finish is Finish.INTERRUPTED]
    for i, rest in zip(
        left, respond(again, [asked[i].after(parts[i].tokens) for i in left]), strict=True
    ):
        parts[i] = parts[i].then(rest)
    assert [part.tokens for part in parts] == wanted


def test_a_front_is_for_seats(folder, spec, factory):
    with pytest.raises(ConfigError, match="'async' is for seats"):
        CpuFactory(settings(folder, front="async", executor="mp"), spec, DEVICES, pool=factory.pool)


@pytest.mark.parametrize("front", ["step", "async"])
def test_a_prompt_that_comes_between_an_interrupt_and_an_update_is_answered(
    start, fronts, weights, front, monkeypatch
):
    """Whoever chose the engine a moment ago hears from it, whatever it is at by then."""
    engine, late = start(published=weights.publish(1), using=fronts[front]), {}
    engine.rpc("nereus_slow", step_s=STEP_S)
    call = engine._call

    def and_a_prompt(name, *args, **kwargs):
        asked = Prompt(name, prompts(1)[0].tokens, Sampling(24, temperature=0.0))
        late[name] = asked, engine.submit(asked)
        return call(name, *args, **kwargs)

    monkeypatch.setattr(engine, "_call", and_a_prompt)
    early = engine.submit(prompts(1, LONG)[0])
    engine.interrupt()
    assert early.result(10).finish is Finish.INTERRUPTED
    asked, found = late.pop("interrupt")
    assert found.result(60).tokens == weights.greedy(asked.tokens, 24)[0]

    early = engine.submit(prompts(1, LONG)[0])
    old = weights.greedy(prompts(1)[0].tokens, LONG)[0]
    weights.change(seed=5)
    engine.update_weights(2, weights.publish(2).manifest(ONE))
    assert sorted(late) == ["check", "interrupt", "update"]
    for asked, found in [(prompts(1, LONG)[0], early), *late.values()]:
        part = found.result(10)
        assert part.finish is Finish.INTERRUPTED
        assert part.tokens == old[: len(part.tokens)]
        rest = engine.submit(asked.after(part.tokens)).result(60)
        assert rest.spans[0].version == 2
        # What had been drawn stays, and what is drawn is of the new weights.
        count = asked.sampling.max_tokens - len(part.tokens)
        assert rest.tokens == weights.greedy((*asked.tokens, *part.tokens), count)[0]
