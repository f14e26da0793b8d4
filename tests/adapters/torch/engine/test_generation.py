"""Generation equals Hugging Face's, and does not depend on layout or batch."""

import engine_peers as ep
import pytest
import torch
from transformers import AutoModelForCausalLM

from nereus_adapters.torch.engine.families import family, full_config, widen_norms
from nereus_adapters.torch.engine.group import Group
from nereus_adapters.torch.engine.sampling import gumbel, sample
from nereus_core.errors import NereusError
from nereus_core.layout import Layout
from nereus_core.state import Slot
from nereus_core.workload import Stage

pytestmark = pytest.mark.real
SEEDS = list(range(100, 108))
GREEDY = {"max_new_tokens": 12, "seeds": SEEDS, "greedy": True}
SAMPLED = {"max_new_tokens": 12, "seeds": SEEDS, "temperature": 0.8}
ENDING = SAMPLED | {"max_new_tokens": 40, "eos_id": 7, "temperature": 1.5}
LAYOUTS = [Layout(2, 1), Layout(4, 1), Layout(1, 3), Layout(2, 2)]


@pytest.fixture(scope="module")
def alone():
    shard = ep.build(ep.LLAMA, Layout(1, 1), 0, stage=Stage.GENERATE)
    shard.init(seed=3)
    return shard


@pytest.mark.parametrize("config", [ep.LLAMA, ep.MISTRAL], ids=["llama", "mistral-window"])
def test_greedy_equals_hugging_face(config):
    shard = ep.build(config, Layout(1, 1), 0, stage=Stage.GENERATE)
    shard.init(seed=3)
    reference = AutoModelForCausalLM.from_config(full_config(config)).double().eval()
    name = config["model_type"]
    widen_norms(reference, name, family(name, 32).norm)
    reference.generation_config.eos_token_id = None
    state = {n: shard.tensor(Slot.PARAM, n) for n in shard.names}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    reference.load_state_dict(state)
    found = shard.generate(ep.PROMPTS, **GREEDY)
    for prompt, response in zip(ep.PROMPTS, found.tokens, strict=True):
        whole = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert response == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_generates_the_same_on_every_rank(peers, alone, layout):
    calls = [GREEDY, SAMPLED, ENDING]
    expected = [alone.generate(ep.PROMPTS, **call) for call in calls]
    for found in peers.run(layout.num_devices, ep.generate_job, ep.LLAMA, layout, calls):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.tokens == theirs.tokens
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert a == pytest.approx(b, abs=1e-10)


def test_a_response_does_not_depend_on_its_batch(alone):
    together = alone.generate(ep.PROMPTS, **SAMPLED)
    for i, prompt in enumerate(ep.PROMPTS):
        single = alone.generate([prompt], **(SAMPLED | {"seeds": [SEEDS[i]]}))
        assert single.tokens[0] == together.tokens[i]


def test_other_seeds_sample_other_responses(alone):
    other = alone.generate(ep.PROMPTS, **(SAMPLED | {"seeds": [s + 1000 for s in SEEDS]}))
    same = alone.generate(ep.PROMPTS, **SAMPLED)
    assert sum(a != b for a, b in zip(other.tokens, same.tokens, strict=True)) >= 7


def test_a_response_ends_with_its_first_end_token(alone):
    found = alone.generate(ep.PROMPTS, **ENDING)
    ended = [row for row in found.tokens if row[-1] == 7]
    assert ended, "no response ended: the case shows nothing"
    assert all(7 not in row[:-1] for row in found.tokens)
    assert all(len(row) == 40 for row in found.tokens if row[-1] != 7)
    assert [len(r) for r in found.tokens] == [len(r) for r in found.logprobs]


def test_logprobs_of_generation_are_those_of_scoring(alone):
    found = alone.generate(ep.PROMPTS, **SAMPLED)
    batch = ep.Batch.of(ep.PROMPTS, found.tokens)
    scored = alone.logprobs(batch)[batch.response_mask]
    sampled = torch.tensor([x for row in found.logprobs for x in row], dtype=torch.float64)
    assert (scored - sampled).abs().max() < 1e-10


def test_a_critic_generates_nothing():
    shard = ep.build(ep.LLAMA, Layout(1, 1), 0, stage=Stage.INFER, value=True)
    shard.init(seed=3)
    with pytest.raises(NereusError, match="value head"):
        shard.generate(ep.PROMPTS, **GREEDY)


def test_what_cannot_be_sampled_is_refused(alone):
    with pytest.raises(NereusError, match="8 prompts and 1 seeds"):
        alone.generate(ep.PROMPTS, **(SAMPLED | {"seeds": [1]}))
    with pytest.raises(NereusError, match="temperature 0 is not positive"):
        alone.generate(ep.PROMPTS, **(SAMPLED | {"temperature": 0.0}))
    assert alone.generate([], **(SAMPLED | {"seeds": []})).tokens == []


def test_sampling_follows_the_softmax():
    """Chi-square of 20,000 draws from 8 tokens; the 0.999 quantile at 7 degrees is 24.3."""
    draws, temperature = 20_000, 0.7
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2])
    tokens, logprobs = sample(
        logits.expand(draws, -1),
        torch.arange(draws),
        torch.full((draws,), 5),
        0,
        Group.single(),
        temperature=temperature,
        greedy=False,
    )
    expected = (logits / temperature).softmax(-1) * draws
    counts = torch.bincount(tokens, minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3
    assert torch.allclose(logprobs, logits.double().log_softmax(-1)[tokens], atol=1e-6)


def test_noise_is_standard_gumbel_and_differs_by_seed_and_position():
    seeds, positions = torch.tensor([1, 1, 2]), torch.tensor([0, 1, 0])
    noise = gumbel(seeds, positions, torch.arange(50_000))
    # Mean: Euler's constant; variance: pi^2 / 6. Six standard errors.
    assert (noise.mean(1) - 0.5772).abs().max() < 6 * (1.645 / 50_000) ** 0.5
    assert (noise.var(1) - 1.645).abs().max() < 0.08
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(3)).abs().max() < 6 / 50_000**0.5
