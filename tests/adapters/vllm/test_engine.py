"""One engine: the same tokens as Hugging Face in every layout, and what becomes of failures."""

import dataclasses
import os
import signal

import numpy as np
import pytest
from vllm_cases import DEVICES, ONE, PP2, TP2, Weights, model_folder, prompts, respond

from nereus_adapters.rollout.ports import EngineError, EngineLost, Finish, Prompt, Sampling
from nereus_adapters.rollout.segment import path
from nereus_adapters.rollout.vllm.harness import CpuFactory, settings
from nereus_adapters.rollout.weights import GarbledWeights
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec

pytestmark = pytest.mark.real


def spoil(published):
    """Change one byte of published weights in shared memory."""
    piece = published.pieces[len(published.pieces) // 2]
    with path(piece.segment).open("r+b") as content:
        content.seek(piece.offset)
        byte = content.read(1)
        content.seek(piece.offset)
        content.write(bytes([byte[0] ^ 0x55]))


@pytest.mark.parametrize("layout", [ONE, TP2, PP2], ids=str)
@pytest.mark.parametrize("trainer", [ONE, TP2], ids=lambda layout: f"from-{layout}")
def test_greedy_tokens_equal_hugging_face_before_and_after_an_update(
    start, weights, layout, trainer
):
    engine = start(layout, published=weights.publish(1, trainer))
    for version in (1, 2):
        if version == 2:
            weights.change(seed=5)
            published = weights.publish(2, trainer)
            engine.update_weights(2, published.manifest(layout))
        for prompt, found in zip(prompts(4), respond(engine, prompts(4)), strict=True):
            tokens, logprobs = weights.greedy(prompt.tokens, 24)
            assert found.tokens == tokens
            assert np.allclose(found.logprobs, logprobs, atol=1e-3)
            assert found.finish is Finish.LENGTH
            assert [(s.version, s.num_tokens) for s in found.spans] == [(version, 24)]


def test_layouts_change_on_the_same_processes(factory, start, weights):
    published = weights.publish(1)
    before = {d: factory.pool.seat(d).pid for d in DEVICES}
    for layout in (TP2, ONE, PP2, TP2):
        engine = start(layout, published=published)
        respond(engine, prompts(2))
        engine.close()
    assert {d: factory.pool.seat(d).pid for d in DEVICES} == before


@pytest.mark.parametrize("layout", [ONE, TP2], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 323, "tie_word_embeddings": False},
        {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
        },
    ],
    ids=["odd vocabulary, untied", "qwen2 with biases"],
)
def test_other_shapes(tmp_path, factory, start, layout, changes):
    folder = model_folder(tmp_path / "model", **changes)
    spec = ModelSpec.from_hf_config(folder, name="actor")
    other = CpuFactory(settings(folder), spec, DEVICES, pool=factory.pool)
    weights = Weights(folder, spec, seed=11)
    engine = start(layout, published=weights.publish(1), using=other)
    found = respond(engine, prompts(3))
    assert [f.tokens for f in found] == [weights.greedy(p.tokens, 24)[0] for p in prompts(3)]
    weights.close()


def test_pipelines_cut_layers_as_the_core_does(tmp_path, factory, start):
    # Three layers: vLLM would give the last stage more, the core gives the first.
    folder = model_folder(tmp_path / "model", num_hidden_layers=3)
    spec = ModelSpec.from_hf_config(folder, name="actor")
    other = CpuFactory(settings(folder), spec, DEVICES, pool=factory.pool)
    weights = Weights(folder, spec, seed=12)
    engine = start(PP2, published=weights.publish(1), using=other)
    found = respond(engine, prompts(3))
    assert [f.tokens for f in found] == [weights.greedy(p.tokens, 24)[0] for p in prompts(3)]
    weights.close()


def test_each_rank_reads_only_what_it_holds(weights):
    published = weights.publish(1)
    whole = published.num_bytes
    assert published.manifest(ONE).num_bytes == whole
    # Under tp the cut tensors are read once in all, norms by each rank; under pp each layer is
    # read by one rank, tied embeddings by both ends.
    by_rank = [sum(p.num_bytes for p in rank) for rank in published.manifest(TP2).ranks]
    assert by_rank[0] == by_rank[1]
    assert whole / 2 <= by_rank[0] < 0.51 * whole
    first, last = published.manifest(PP2).ranks
    shared = {p.cell for p in first} & {p.cell for p in last}
    assert {cell.tensor for cell in shared} == {"model.embed_tokens.weight"}


def test_stop_tokens_end_a_response_and_belong_to_it(start, weights):
    engine = start(published=weights.publish(1))
    prompt = prompts(1, max_tokens=24)[0]
    tokens, _ = weights.greedy(prompt.tokens, 24)
    stop = tokens[5]
    sampling = dataclasses.replace(prompt.sampling, stop_ids=(stop,))
    found = engine.submit(dataclasses.replace(prompt, sampling=sampling)).result(60)
    assert found.finish is Finish.STOP
    assert found.tokens == tokens[: tokens.index(stop) + 1]


def test_seeded_draws_do_not_depend_on_the_layout(start, weights):
    published = weights.publish(1)
    asked = [
        Prompt(f"s{i}", p.tokens, Sampling(16, temperature=1.0, seed=100 + i))
        for i, p in enumerate(prompts(4))
    ]
    found = []
    for layout in (ONE, TP2):
        engine = start(layout, published=published)
        found.append([f.tokens for f in respond(engine, asked)])
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("layout", [ONE, PP2], ids=str)
def test_an_interrupted_response_goes_on_without_a_token_lost_or_repeated(start, weights, layout):
    engine = start(layout, published=weights.publish(1))
    asked = prompts(6, max_tokens=48)
    wanted = [weights.greedy(p.tokens, 48)[0] for p in asked]
    futures = [engine.submit(p) for p in asked]
    first = engine.submit(Prompt("soon done", (1, 5, 9), Sampling(4, temperature=0.0)))
    first.result(60)
    engine.interrupt()
    parts = [f.result(10) for f in futures]
    assert {p.finish for p in parts} == {Finish.INTERRUPTED}
    assert all(0 < len(p.tokens) < 48 for p in parts)
    rest = respond(engine, [p.after(part.tokens) for p, part in zip(asked, parts, strict=True)])
    whole = [part.then(r) for part, r in zip(parts, rest, strict=True)]
    assert [w.tokens for w in whole] == wanted
    assert [len(w.logprobs) for w in whole] == [48] * 6


def test_weights_garbled_on_their_way_are_refused_and_the_old_ones_serve_on(start, weights):
    engine = start(TP2, published=weights.publish(1))
    wanted = [weights.greedy(p.tokens, 24)[0] for p in prompts(3)]
    weights.change(seed=6)
    published = weights.publish(2)
    spoil(published)
    with pytest.raises(GarbledWeights, match="another digest"):
        engine.update_weights(2, published.manifest(TP2))
    assert engine.version == 1
    assert [f.tokens for f in respond(engine, prompts(3))] == wanted


def test_a_cache_that_is_too_small_preempts_and_every_token_comes(
    factory, folder, spec, start, weights
):
    small = dataclasses.replace(
        settings(folder), more={"block_size": 32, "num_gpu_blocks_override": 8}
    )
    tight = CpuFactory(small, spec, DEVICES, pool=factory.pool)
    engine = start(published=weights.publish(1), using=tight)
    asked = prompts(8, max_tokens=40)
    found = respond(engine, asked)
    assert [f.tokens for f in found] == [weights.greedy(p.tokens, 40)[0] for p in asked]
    seen = engine.signals()
    assert seen.preemptions > 0
    assert seen.waiting > 0
    assert 0.5 < seen.kv_cache_use <= 1
    assert seen.tokens_per_s > 0
    assert seen.first_token_s > 0
    assert 2**20 < min(seen.peak_bytes.values()) < 2 * 2**30
    assert engine.signals().generated_tokens == 0


def test_a_prompt_too_long_is_refused_and_the_others_go_on(start, weights):
    engine = start(published=weights.publish(1))
    good = engine.submit(prompts(1)[0])
    bad = engine.submit(Prompt("long", tuple([5] * 130), Sampling(8)))
    with pytest.raises(EngineError, match="respond to long"):
        bad.result(60)
    assert len(good.result(60).tokens) == 24


@pytest.mark.parametrize("rank", [0, 1], ids=["the leader", "a follower"])
def test_a_seat_killed_while_generating_loses_the_engine_and_no_token(
    factory, start, weights, rank
):
    published = weights.publish(1)
    engine = start(TP2, published=published)
    asked = prompts(6, max_tokens=48)
    wanted = [weights.greedy(p.tokens, 48)[0] for p in asked]
    futures = [engine.submit(p) for p in asked]
    engine.submit(Prompt("soon done", (1, 5, 9), Sampling(2, temperature=0.0))).result(60)
    os.kill(factory.pool.seat(DEVICES[rank]).pid, signal.SIGKILL)
    parts = [f.result(60) for f in futures]
    assert not engine.alive
    with pytest.raises(EngineLost):
        engine.signals()
    engine.close()
    again = start(TP2, published=published)
    rest = respond(again, [p.after(part.tokens) for p, part in zip(asked, parts, strict=True)])
    assert [a.then(b).tokens for a, b in zip(parts, rest, strict=True)] == wanted


def test_a_layout_that_vllm_refuses_leaves_the_seats_usable(factory, start, weights):
    with pytest.raises(EngineError, match="start"):
        factory.create("three", Layout(2, 1), (DEVICES[0], DEVICES[0]))
    engine = start(TP2, published=weights.publish(1))
    assert respond(engine, prompts(1))[0].tokens == weights.greedy(prompts(1)[0].tokens, 24)[0]
