"""One rank computes what Hugging Face's own models compute."""

from dataclasses import replace

import engine_peers as ep
import pytest
import torch
import transformers

from nereus_adapters.torch.engine import UnitShard
from nereus_adapters.torch.engine.families import family, full_config, widen_norms
from nereus_core.errors import ModelConfigError
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import Slot
from nereus_core.workload import Stage

pytestmark = pytest.mark.real
ONE = Layout(1, 1)
MODELS = {
    "llama": (ep.LLAMA, transformers.LlamaForCausalLM),
    "qwen2": (ep.QWEN2, transformers.Qwen2ForCausalLM),
    "qwen3": (ep.QWEN3, transformers.Qwen3ForCausalLM),
    "gemma": (ep.GEMMA, transformers.GemmaForCausalLM),
    "mistral": (ep.MISTRAL, transformers.MistralForCausalLM),
}


def same_weights(name, dtype, *, widen):
    """A shard and Hugging Face's model with equal weights, biases and norms not at their start."""
    config, reference_class = MODELS[name]
    shard = ep.build(config, ONE, 0, dtype=dtype)
    shard.init(seed=1)
    draw = torch.Generator().manual_seed(0)
    for tensor in shard.names:
        values = shard.tensor(Slot.PARAM, tensor)
        if values.dim() == 1:
            values += 0.3 * torch.randn(values.shape, generator=draw).to(dtype)
    reference = reference_class(full_config(config)).to(dtype)
    if widen:
        # Hugging Face rounds to float32 inside its norms even where the model is float64.
        widen_norms(reference, name, family(name, 32).norm)
    state = {n: shard.tensor(Slot.PARAM, n) for n in shard.names}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict(state)
    return shard, reference


def response_logprobs(reference, batch):
    attention = torch.arange(batch.tokens.shape[1]) < batch.total_lens[:, None]
    logits = reference(batch.tokens, attention_mask=attention.long()).logits
    every = logits[:, :-1].log_softmax(-1)
    return every.gather(-1, batch.tokens[:, 1:, None])[..., 0], every


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_in_float64(name):
    shard, reference = same_weights(name, torch.float64, widen=True)
    batch = ep.batch_of(0)
    with torch.no_grad():
        expected, _ = response_logprobs(reference, batch)
    found = shard.logprobs(batch)[:, 1:]
    mask = batch.response_mask[:, 1:]
    assert (found - expected)[mask].abs().max() < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_in_float32_against_an_untouched_model(name):
    shard, reference = same_weights(name, torch.float32, widen=False)
    batch = ep.batch_of(0, torch.float32)
    with torch.no_grad():
        expected, _ = response_logprobs(reference, batch)
    found = shard.logprobs(batch)[:, 1:]
    mask = batch.response_mask[:, 1:]
    assert (found - expected)[mask].abs().max() < 5e-5


def test_three_steps_against_autograd_and_torch_adamw():
    """The whole step by other code: log_softmax, the loss as written in papers, torch's AdamW."""
    shard, reference = same_weights("qwen3", torch.float64, widen=True)
    spec = ep.SPEC
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=spec.lr, weight_decay=spec.weight_decay, foreach=False
    )
    for step in range(3):
        batch = ep.batch_of(step)
        loss_spec = ep.loss_for(batch)
        mask = batch.response_mask[:, 1:]
        logprob, every = response_logprobs(reference, batch)
        logprob, every = logprob[mask], every[mask]
        advantage = batch.advantages[:, 1:][mask]
        ratio = (logprob - batch.old_logprobs[:, 1:][mask]).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.7, 1.3) * advantage)
        log_ratio = batch.ref_logprobs[:, 1:][mask] - logprob
        kl = log_ratio.exp() - log_ratio - 1
        entropy = -(every.exp() * every).sum(-1)
        loss = (-surrogate + 0.1 * kl - 0.05 * entropy).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), spec.max_grad_norm)
        # Two warm-up steps, then the start of a cosine.
        rate = spec.lr * (0.5, 1.0, 1.0)[step]
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        metrics = shard.train(batch, loss_spec, micro_batch=3)
        assert metrics.loss == pytest.approx(loss.item(), abs=1e-10)
        assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-10)
        assert metrics.entropy == pytest.approx(entropy.mean().item(), abs=1e-10)
        assert metrics.lr == rate
    for name, expected in reference.named_parameters():
        difference = shard.tensor(Slot.PARAM, name) - expected
        assert difference.abs().max() < 1e-9, name


def test_training_in_bfloat16_keeps_wide_moments_and_learns():
    shard = ep.build(ep.LLAMA, ONE, 0, dtype=torch.bfloat16)
    shard.init(seed=3)
    batch = ep.batch_of(0, torch.float32)
    flat = torch.zeros_like(batch.advantages)
    batch = replace(batch, returns=None, old_values=None, advantages=flat + 1.0)
    before = shard.logprobs(batch).sum()
    batch = replace(batch, old_logprobs=shard.logprobs(batch))
    for _ in range(4):
        shard.train(batch, replace(ep.loss_for(batch), kl_coef=0.0), micro_batch=8)
    assert shard.tensor(Slot.PARAM, shard.names[0]).dtype is torch.bfloat16
    assert shard.tensor(Slot.EXP_AVG_SQ, shard.names[0]).dtype is torch.float32
    assert shard.logprobs(batch).sum() > before


def test_storage_comes_by_replace_and_is_adopted_not_copied():
    donor, heir = ep.build(ep.LLAMA, ONE, 0), ep.build(ep.LLAMA, ONE, 0)
    donor.init(seed=5)
    assert heir.resident_bytes() == 0
    heir.replace({(s, n): donor.tensor(s, n) for s in donor.slots for n in donor.names})
    name = heir.names[0]
    assert heir.tensor(Slot.PARAM, name).data_ptr() == donor.tensor(Slot.PARAM, name).data_ptr()
    assert heir.digests() == donor.digests()
    assert heir.resident_bytes() == donor.resident_bytes()


def test_gradients_are_not_kept_between_steps():
    shard = ep.build(ep.LLAMA, ONE, 0)
    shard.init(seed=3)
    held = shard.resident_bytes()
    batch = ep.batch_of(0)
    shard.train(batch, ep.loss_for(batch), micro_batch=4)
    elements = sum(shard.box(n).num_elements for n in shard.names)
    assert shard.resident_bytes() == held == 3 * 8 * elements


def test_a_family_the_engine_does_not_run_is_refused_by_name():
    config = ep.UNTIED | {"model_type": "gemma2"}
    with pytest.raises(ModelConfigError, match="gemma2"):
        UnitShard(
            ModelSpec.from_hf_config(config), config, ONE, 0, Stage.INFER, torch.float32, ep.CPU
        )


def test_a_config_with_tensors_the_state_map_does_not_know_is_refused():
    config = ep.UNTIED | {"mlp_bias": True}
    with pytest.raises(ModelConfigError, match=r"mlp\.down_proj\.bias"):
        UnitShard(
            ModelSpec.from_hf_config(config), config, ONE, 0, Stage.INFER, torch.float32, ep.CPU
        )
