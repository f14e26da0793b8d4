import os
import signal
import time
from pathlib import Path

import pytest
from tiny_llama import CONFIG, TinyLlama, flip

from nereus_adapters.rollout.assembling import assembled
from nereus_adapters.rollout.ports import EngineError, EngineLost, Finish, Prompt, Sampling
from nereus_adapters.rollout.sglang.calls import Call
from nereus_adapters.rollout.sglang.factory import SglangEngines
from nereus_adapters.rollout.sglang.peeking import parts
from nereus_adapters.rollout.weights import GarbledWeights
from nereus_core.layout import Layout
from nereus_core.workload import Stage

pytestmark = pytest.mark.real

PROMPTS = ((5, 6, 7, 8, 9), (100, 3, 50), (300, 1), tuple(range(40, 75)))


def prompt(name, tokens, count, **sampling):
    return Prompt(name, tuple(tokens), Sampling(count, temperature=0.0, **sampling))


def respond(engine, count=12):
    futures = [engine.submit(prompt(f"p{i}", t, count)) for i, t in enumerate(PROMPTS)]
    return [future.result(60) for future in futures]


def wait_for(holds, what, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def begun(engine, name, tokens, count, at_least=3):
    """Submit, and wait until some tokens have come."""
    future = engine.submit(prompt(name, tokens, count))
    wait_for(lambda: len(engine.drawn(name)) >= at_least, f"{name} to have begun")
    return future


@pytest.mark.parametrize("layout", ["tp1pp1", "tp2pp1", "tp1pp2", "tp2pp2"])
def test_greedy_tokens_are_hugging_faces_before_and_after_each_update(start, llama, layout):
    engine = start(layout, Layout.parse(layout))
    for trainer in (Layout(1, 1), Layout(2, 1), Layout(1, 2)):
        llama.train()
        engine.update_weights(llama.version, llama.publish(trainer).manifest(engine.layout))
        for tokens, found in zip(PROMPTS, respond(engine), strict=True):
            assert found.tokens == llama.greedy(tokens, 12)
            assert found.finish is Finish.LENGTH
            assert len(found.logprobs) == 12
            assert all(value <= 0 for value in found.logprobs)
            assert [(s.version, s.num_tokens) for s in found.spans] == [(llama.version, 12)]


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(2, 2)], ids=str)
def test_ranks_hold_what_the_trainer_published(start, llama, layout):
    engine = start("holds", layout)
    engine.update_weights(llama.version, llama.publish(Layout(1, 2)).manifest(layout))
    ranks = engine.call_ranks(Call(parts))  # longer than what a socket takes at once
    found = assembled(llama.spec, Stage.GENERATE, ranks)
    assert set(found) == {f"param/{name}" for name in llama.tensors}
    for name, tensor in llama.tensors.items():
        assert (found[f"param/{name}"] == tensor.detach().numpy()).all(), name


def test_a_tied_head_works_in_a_pipeline(engines, start):
    tied = TinyLlama({**CONFIG, "tie_word_embeddings": True})
    factory = SglangEngines(tied.config, engines.healthy, max_tokens=1024, pool=engines.pool)
    engine = start("tied", Layout(1, 2), factory=factory)
    engine.update_weights(tied.version, tied.publish().manifest(engine.layout))
    assert respond(engine)[0].tokens == tied.greedy(PROMPTS[0], 12)
    tied.close()
    factory.close()


def test_a_response_ends_with_the_token_that_stops_it_and_with_no_other(start, llama):
    engine = start("stops")
    engine.update_weights(llama.version, llama.publish().manifest(engine.layout))
    expected = llama.greedy(PROMPTS[0], 12)
    place = expected.index(expected[5])
    found = engine.submit(prompt("stop", PROMPTS[0], 12, stop_ids=(expected[5],))).result(60)
    assert found.tokens == expected[: place + 1]
    assert found.finish is Finish.STOP


def test_interrupted_responses_go_on_with_no_token_lost_or_repeated(start, llama):
    first, second = start("first"), start("second", Layout(2, 1), first=1)
    weights = llama.publish()
    for engine in (first, second):
        engine.update_weights(llama.version, weights.manifest(engine.layout))
    count = 120
    # More prompts than are decoded at once: some are interrupted while they wait.
    prompts = [prompt(f"r{i}", (7 + i, 8, 9), count) for i in range(11)]
    so_far = [None] * len(prompts)
    for engine in (first, second, first):
        futures = [
            engine.submit(p if part is None else p.after(part.tokens))
            for p, part in zip(prompts, so_far, strict=True)
        ]
        wait_for(lambda e=engine: len(e.drawn("r0")) > 2, "tokens")
        if so_far[0] is None or engine is second:
            engine.interrupt()
        parts = [future.result(120) for future in futures]
        so_far = [
            p if part is None else part.then(p) for part, p in zip(so_far, parts, strict=True)
        ]
    for wanted, found in zip(prompts, so_far, strict=True):
        assert found.finish is Finish.LENGTH
        assert len(found.tokens) == len(found.logprobs) == count
        assert llama.drew(wanted.tokens, found.tokens)


def test_responses_that_began_a_moment_before_are_interrupted_and_lose_no_token(start, llama):
    """They are on their way to the ranks, which know nothing of them when they are told to end."""
    engine = start("racing", Layout(2, 1))
    engine.update_weights(llama.version, llama.publish().manifest(engine.layout))
    count = 200
    prompts = [prompt(f"q{i}", (7 + i, 8, 9), count) for i in range(6)]
    so_far = [None] * len(prompts)
    for _ in range(12):
        futures = [
            engine.submit(p if part is None else p.after(part.tokens))
            for p, part in zip(prompts, so_far, strict=True)
        ]
        engine.interrupt()
        assert all(future.done() for future in futures)
        parts = [future.result() for future in futures]
        assert {part.finish for part in parts} == {Finish.INTERRUPTED}
        so_far = [
            p if part is None else part.then(p) for part, p in zip(so_far, parts, strict=True)
        ]
    futures = [engine.submit(p.after(q.tokens)) for p, q in zip(prompts, so_far, strict=True)]
    for wanted, part, future in zip(prompts, so_far, futures, strict=True):
        found = part.then(future.result(120))
        assert found.finish is Finish.LENGTH
        assert len(found.tokens) == len(found.logprobs) == count
        assert llama.drew(wanted.tokens, found.tokens)


def test_an_engine_without_weights_refuses_prompts(start):
    with pytest.raises(EngineError, match="no weights"):
        start("empty").submit(prompt("p", (1,), 1)).result(10)


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2)], ids=str)
def test_weights_changed_on_their_way_are_refused_and_others_serve_on(start, llama, layout):
    victim, other = start("victim", layout), start("other", first=2)
    llama.train()
    weights = llama.publish()
    other.update_weights(llama.version, weights.manifest(other.layout))
    # The last rank's last piece: rank 0, which answers, sees nothing wrong.
    piece = weights.manifest(victim.layout).ranks[-1][-1]
    flip(piece)
    try:
        with pytest.raises(GarbledWeights, match="digest"):
            victim.update_weights(llama.version, weights.manifest(victim.layout))
    finally:
        flip(piece)
    assert victim.version is None
    with pytest.raises(EngineError, match="no weights"):
        victim.submit(prompt("p", (1,), 1)).result(10)
    assert respond(other)[0].tokens == llama.greedy(PROMPTS[0], 12)
    victim.close()
    rebuilt = start("rebuilt", layout)
    rebuilt.update_weights(llama.version, weights.manifest(rebuilt.layout))
    assert respond(rebuilt)[0].tokens == llama.greedy(PROMPTS[0], 12)


@pytest.mark.parametrize("who", ["engine process", "last rank"])
def test_a_killed_engine_leaves_the_tokens_it_drew_and_they_go_on_elsewhere(start, llama, who):
    victim, other = start("killed", Layout(2, 1)), start("heir", first=2)
    weights = llama.publish()
    for engine in (victim, other):
        engine.update_weights(llama.version, weights.manifest(engine.layout))
    wanted = prompt("long", PROMPTS[1], 150)
    future = begun(victim, "long", PROMPTS[1], 150)
    os.kill(victim.pid if who == "engine process" else victim.pids[-1], signal.SIGKILL)
    part = future.result(20)
    assert part.finish is Finish.INTERRUPTED
    assert 3 <= len(part.tokens) < 150
    assert not victim.alive
    with pytest.raises(EngineLost):
        victim.signals()
    whole = part.then(other.submit(wanted.after(part.tokens)).result(120))
    assert len(whole.tokens) == 150
    assert llama.drew(PROMPTS[1], whole.tokens)
    lost, repeated = (*whole.tokens[:2], *whole.tokens[3:]), (whole.tokens[0], *whole.tokens)
    assert not llama.drew(PROMPTS[1], lost)  # the check would see it
    assert not llama.drew(PROMPTS[1], repeated)


def test_a_full_cache_puts_requests_back_and_every_token_comes(engines, llama, start):
    # As many as there is room for begin, whatever they may come to need.
    bold = SglangEngines(
        llama.config,
        engines.healthy,
        max_tokens=2048,
        max_running=8,
        arguments={"schedule_conservativeness": 0.01},
        pool=engines.pool,
    )
    engine = start("full", factory=bold)
    engine.update_weights(llama.version, llama.publish().manifest(engine.layout))
    engine.signals()
    # 8 at once x 400 tokens do not fit into 2048.
    prompts = [prompt(f"f{i}", (11 + i, 12), 400) for i in range(8)]
    found = [f.result(300) for f in [engine.submit(p) for p in prompts]]
    seen = engine.signals()
    assert seen.preemptions > 0
    assert seen.kv_cache_use > 0.8
    assert seen.running > 1
    assert seen.waiting > 0
    assert seen.generated_tokens == 8 * 400
    assert seen.tokens_per_s > 0
    assert 0 < seen.first_token_s < seen.busy_s
    assert all(peak > 2**20 for peak in seen.peak_bytes.values())
    for wanted, one in zip(prompts, found, strict=True):
        assert one.finish is Finish.LENGTH
        assert len(one.tokens) == 400
        assert llama.drew(wanted.tokens, one.tokens)
    bold.close()


def test_closed_engines_leave_no_process_and_nothing_in_shared_memory(start, llama):
    left = {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("sgl", "sem."))}
    engine = start("leaves", Layout(2, 1))
    engine.update_weights(llama.version, llama.publish().manifest(engine.layout))
    future = begun(engine, "long", PROMPTS[0], 100)
    pids = (engine.pid, *engine.pids)
    engine.close()
    assert future.result(1).finish is Finish.INTERRUPTED
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    now = {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("sgl", "sem."))}
    assert now <= left


def test_an_engine_that_cannot_come_up_says_why(engines, llama):
    here = tuple(sorted(engines.healthy))
    with pytest.raises(EngineError, match="4 kv heads are not a multiple of tp=3"):
        engines.create("odd", Layout(3, 1), here[:3])
    wrong = SglangEngines(
        llama.config, here, arguments={"attention_backend": "flashinfer"}, pool=engines.pool
    )
    with pytest.raises(EngineError, match=r"(?s)failed to come up.*flashinfer"):
        wrong.create("wrong", Layout(1, 1), here[:1])
    wrong.close()
