"""Continuous batching in closed form, against an event simulation that shares no code with it."""

import csv
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_core.cost.batching import cache_slots, evicted_tokens, response_classes, timeline
from nereus_core.cost.generation import Decoding
from nereus_core.cost.lengths import Lengths
from nereus_core.errors import CostInputError
from nereus_core.observation import TokenStats

DATA = Path(os.environ.get("NEREUS_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
Draw = Callable[[np.random.Generator, int], np.ndarray]


def azure(name: str) -> Draw:
    path = DATA / "lengths" / f"azure_2023_{name}.csv.gz"
    if not path.exists():
        pytest.skip(f"no {path}; set NEREUS_DATA")
    with gzip.open(path, "rt") as file:
        counts = np.array([int(row["GeneratedTokens"]) for row in csv.DictReader(file)])
    return lambda random, number: random.choice(counts[counts > 0], number)


SYNTHETIC: dict[str, Draw] = {
    "all equal": lambda random, number: np.full(number, 300),
    "exponential": lambda random, number: 1 + random.exponential(200, number).astype(int),
    "clipped lognormal": lambda random, number: np.minimum(
        1 + random.lognormal(5, 0.9, number).astype(int), 1024
    ),
    "uniform": lambda random, number: random.integers(1, 600, number),
}


def simulate(prompt: int, responses: np.ndarray, slots: int, cache: float = np.inf):
    """Decode one batch token by token as an engine does.

    Waiting sequences are admitted while there is a slot and their tokens fit; when the cache is
    full, the newest is evicted to the head of the queue and computed again.

    Returns: alive sequences and their summed context per iteration, evicted tokens.
    """
    waiting, running = list(range(len(responses)))[::-1], list[int]()
    responses = responses.tolist()
    done = [0] * len(responses)
    alive, context, evicted = [], [], 0
    while waiting or running:
        used = sum(done[i] for i in running) + (prompt + 1) * len(running)
        while waiting and len(running) < slots:
            need = prompt + done[waiting[-1]] + 1
            if used + need > cache and running:
                break
            running.append(waiting.pop())
            used += need
        while used > cache and len(running) > 1:
            last = running.pop()
            evicted += prompt + done[last]
            used -= prompt + done[last] + 1
            waiting.append(last)
        alive.append(len(running))
        context.append(sum(done[i] for i in running) + prompt * len(running))
        for i in running:
            done[i] += 1
        running = [i for i in running if done[i] < responses[i]]
    return np.array(alive), np.array(context), evicted


def seconds(alive: np.ndarray) -> np.ndarray:
    """Of an iteration: reading weights, and work per sequence (any convex cost would do)."""
    return np.hypot(20.0, 0.4 * alive)


def decoding(lengths: Lengths, batch: int, slots: float) -> Decoding:
    return Decoding.of(lengths, batch, np.array([slots]), np.ones(1))


def lengths_of(prompt: int, responses: np.ndarray, *, quantiles: bool) -> Lengths:
    stats = TokenStats.of(responses.tolist())
    p95 = max(stats.mean, stats.p95)
    known = stats.quantiles if quantiles else ()
    return Lengths(prompt, stats.mean, p95, stats.max, known)


def errors(draw: Draw, slots: int, *, quantiles: bool, batch: int = 256, trials: int = 8):
    """Relative errors of decode seconds and of tokens read, averaged over batches."""
    found = []
    for seed in range(trials):
        responses = draw(np.random.default_rng(seed), batch)
        alive, context, _ = simulate(200, responses, slots)
        lengths = lengths_of(200, responses, quantiles=quantiles)
        closed = decoding(lengths, batch, slots)
        predicted_s = (closed.iterations * seconds(closed.alive)).sum()
        read = (closed.iterations * closed.alive * closed.context).sum()
        found.append((predicted_s / seconds(alive).sum() - 1, read / context.sum() - 1))
    return np.mean(found, axis=0)


@pytest.mark.parametrize("slots", [256, 128, 40])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_decode_seconds_are_those_of_an_event_simulation(name, slots):
    time_error, read_error = errors(SYNTHETIC[name], slots, quantiles=True)
    assert abs(time_error) < 0.05
    assert abs(read_error) < 0.08


@pytest.mark.parametrize("slots", [256, 96])
@pytest.mark.parametrize("name", ["code", "conv"])
def test_so_are_they_on_lengths_of_a_real_service(name, slots):
    time_error, _ = errors(azure(name), slots, quantiles=True)
    assert abs(time_error) < 0.05


@pytest.mark.parametrize("name", ["exponential", "clipped lognormal"])
def test_mean_p95_and_longest_alone_come_close(name):
    for slots in (256, 128):
        time_error, _ = errors(SYNTHETIC[name], slots, quantiles=False)
        assert abs(time_error) < 0.08


@pytest.mark.parametrize("name", ["exponential", "clipped lognormal", "uniform"])
def test_a_small_cache_decodes_as_many_and_evicts_as_much_as_simulated(name):
    batch, prompt = 256, 200
    for cache in (12_000, 24_000):
        ratios = []
        for seed in range(3):
            responses = SYNTHETIC[name](np.random.default_rng(seed), batch)
            alive, _, evicted = simulate(prompt, responses, batch, cache)
            lengths = lengths_of(prompt, responses, quantiles=True)
            slots = cache_slots(lengths, batch, np.array([float(batch)]), np.array([float(cache)]))
            closed = decoding(lengths, batch, float(slots[0]))
            predicted_s = (closed.iterations * seconds(closed.alive)).sum()
            again = float(evicted_tokens(lengths, np.array([float(batch)]), slots)[0])
            total = float((responses + prompt).sum())
            ratios.append((predicted_s / seconds(alive).sum() - 1, (again - evicted) / total))
        time_error, evicted_error = np.mean(ratios, axis=0)
        assert abs(time_error) < 0.12
        assert abs(evicted_error) < 0.15  # of all tokens of the batch


figures = st.tuples(
    st.floats(1, 4000), st.floats(1, 4), st.floats(1, 4), st.floats(0, 2000), st.integers(1, 2048)
)


def made(figure) -> tuple[Lengths, int]:
    mean, more, longest, prompt, batch = figure
    return Lengths(prompt, mean, mean * more, mean * more * longest), batch


@settings(max_examples=60, deadline=None)
@given(figures, st.sampled_from([1.0, 1.5, 2.0, 4.0, 16.0]))
def test_every_response_token_is_decoded_once(figure, rounds):
    lengths, batch = made(figure)
    line = timeline(lengths, batch, rounds)
    took = np.diff(line.ends, prepend=0.0)
    assert (took >= 0).all()
    assert (took * line.alive).sum() == pytest.approx(rounds * lengths.response_mean, rel=0.05)
    assert (np.diff(line.alive) <= 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(figures)
def test_representative_lengths_have_the_mean_that_is_known(figure):
    lengths, batch = made(figure)
    responses, weights = response_classes(lengths, batch)
    assert weights.sum() == pytest.approx(1.0)
    assert responses @ weights == pytest.approx(lengths.response_mean)
    assert (np.diff(responses) >= -1e-6).all()


@settings(max_examples=25, deadline=None)
@given(figures, st.floats(1.05, 3))
def test_a_longer_tail_ends_no_earlier(figure, factor):
    lengths, batch = made(figure)
    batch = max(batch, 32)
    longer = Lengths(
        lengths.prompt_mean,
        lengths.response_mean,
        lengths.response_p95,
        lengths.response_max * factor,
    )
    ends = [timeline(some, batch, 1.0).last(float(batch)) for some in (lengths, longer)]
    assert ends[1] >= ends[0] * 0.99


@settings(max_examples=40, deadline=None)
@given(figures, st.floats(10, 1e6), st.floats(1, 8))
def test_a_larger_cache_never_holds_fewer(figure, cache, factor):
    lengths, batch = made(figure)
    sequences = np.array([float(batch)])
    small, large = (
        cache_slots(lengths, batch, sequences, np.array([tokens]))
        for tokens in (cache, cache * factor)
    )
    assert 1 <= small[0] <= large[0] <= batch


def test_nonsense_is_refused_by_name():
    lengths = Lengths(10, 20, 30, 40)
    with pytest.raises(CostInputError, match="sequences per slot is 0"):
        timeline(lengths, 8, 0.5)
    with pytest.raises(CostInputError, match="cache tokens is -1"):
        cache_slots(lengths, 8, np.array([8.0]), np.array([-1.0]))
    with pytest.raises(CostInputError, match="response_mean is -1"):
        Lengths(10, -1, 30, 40)
    with pytest.raises(CostInputError, match="prompt_mean is nan"):
        Lengths(float("nan"), 20, 30, 40)
    with pytest.raises(CostInputError, match="rising order"):
        Lengths(10, 20, 15, 40)
