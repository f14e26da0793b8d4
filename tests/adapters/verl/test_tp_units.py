"""The tensor-parallel engine alone: what it computes is what verl's own engine computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from verl_cpu.engines import Case, run_cases

from nereus_adapters.verl.cuts import ROWS, Cut
from nereus_adapters.verl.tensor_parallel.plan import cuts_of, require_divides, shares_of
from nereus_core.errors import Unsupported

pytestmark = pytest.mark.real

WORLD = 4
BETWEEN_S = 400
"""Four processes on two cores that others use too: chosen, not measured."""
ULPS = 64 * 2**-23
"""Of float32: sums over a few hundred terms, added up in another order, in two steps."""
FAMILIES = {
    # Its vocabulary divides by 4, its padding token gets no gradient, every projection has a bias.
    "qwen2": {"num_key_value_heads": 4, "vocab_size": 96, "pad_token_id": 3},
    # Norms of each head, heads shared by queries, embedding and head tied, a rank with padding.
    "qwen3": {
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "pad_token_id": 40,
    },
    # A vocabulary that nobody divides.
    "llama": {"num_key_value_heads": 2, "vocab_size": 61, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 4, "vocab_size": 64},
}


def tiny(kind, **more):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "bos_token_id": None, "eos_token_id": 2}
    return AutoConfig.for_model(kind, **sizes, **heads, **more)


def cases(folder):
    found = []
    for kind, more in FAMILIES.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(tiny(kind, **more))
        with torch.no_grad():  # biases and norms begin as 0 and 1, which hides where they go
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / kind)
        degrees = [2, 4] if more["num_key_value_heads"] == 4 else [2]
        found += [Case(f"{kind}-verl", str(folder / kind), vendor=None)]
        found += [Case(f"{kind}-{n}", str(folder / kind), n) for n in (1, *degrees)]
    torch.manual_seed(7)
    critic = tiny("qwen2", num_labels=1, **FAMILIES["qwen2"])
    AutoModelForTokenClassification.from_config(critic).save_pretrained(folder / "critic")
    at = {"model": str(folder / "critic"), "kind": "value_model"}
    found += [Case("critic-verl", vendor=None, **at), Case("critic-2", degree=2, **at)]
    found += [Case("qwen2-bf16-verl", str(folder / "qwen2"), vendor=None, dtype="bf16")]
    found += [Case("qwen2-bf16-4", str(folder / "qwen2"), 4, dtype="bf16")]
    found += [Case("llama-4", str(folder / "llama"), 4)]
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    asked = cases(folder)
    run_cases(folder, asked, WORLD, BETWEEN_S)
    return {case.name: torch.load(folder / f"{case.name}.pt") for case in asked}


PAIRS = [
    *(("qwen2", n) for n in (1, 2, 4)),
    *(("qwen3", n) for n in (1, 2)),
    *(("llama", n) for n in (1, 2)),
    *(("mistral", n) for n in (1, 2, 4)),
    ("critic", 2),
]


@pytest.mark.parametrize(("kind", "degree"), PAIRS)
def test_it_computes_and_learns_what_verls_own_engine_does(outcomes, kind, degree):
    ours, verls = outcomes[f"{kind}-{degree}"], outcomes[f"{kind}-verl"]
    assert "error" not in ours, ours
    for key in ("outputs", "after"):
        scale = verls[key].abs().max()
        assert (ours[key] - verls[key]).abs().max() <= ULPS * scale, key
    assert (verls["after"] - verls["outputs"]).abs().max() > 1e-3  # it has learned something
    for key in ("losses", "grad_norms"):
        assert ours[key] == pytest.approx(verls[key], rel=ULPS)
    assert sorted(ours["weights"]) == sorted(verls["weights"])
    for name, moment in verls["moments"].items():
        scale = moment.abs().max()
        assert scale > 0, name
        # Squares of gradients: twice their relative difference.
        assert (ours["moments"][name] - moment).abs().max() <= 4 * ULPS * scale, name


@pytest.mark.parametrize("kind", FAMILIES)
def test_without_tensor_parallelism_it_is_verls_own_to_the_last_bit(outcomes, kind):
    ours, verls = outcomes[f"{kind}-1"], outcomes[f"{kind}-verl"]
    for name, tensor in verls["weights"].items():
        assert torch.equal(ours["weights"][name], tensor), name


@pytest.mark.parametrize(("kind", "degree"), [("qwen2", 4), ("mistral", 2)])
def test_a_rank_holds_its_part_and_no_more(outcomes, kind, degree):
    """All but norms and the biases of rows is cut."""
    whole = sum(tensor.numel() for tensor in outcomes[f"{kind}-verl"]["weights"].values())
    norms = 5 * 32
    assert outcomes[f"{kind}-{degree}"]["elements"] == (whole - norms) // degree + norms


def test_bf16_is_as_close_to_float32_as_verls_own(outcomes):
    exact = outcomes["qwen2-verl"]["outputs"]
    both = ("qwen2-bf16-4", "qwen2-bf16-verl")
    ours, verls = ((outcomes[name]["outputs"] - exact).abs().max() for name in both)
    assert 0 < ours < 3 * verls


def test_key_value_heads_that_ranks_cannot_share_are_refused_by_name(outcomes):
    assert "tp=4 does not divide num_key_value_heads=2" in outcomes["llama-4"]["error"]


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("gpt2", {}, "no tensor-parallel plan for GPT2LMHeadModel"),
        ("phi3", {"pad_token_id": 0}, "o_proj is to be shared as 'rowwise_split_input'"),
        ("qwen3_moe", {"num_experts": 2, "moe_intermediate_size": 8}, "is to be shared as"),
    ],
)
def test_models_that_cannot_be_shared_are_refused_by_name(kind, more, said):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(kind, vocab_size=64, **more))
    with pytest.raises(Unsupported, match=said):
        shares_of(model)


def test_each_number_that_the_degree_does_not_divide_is_named():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny("llama", vocab_size=64))
    with pytest.raises(Unsupported) as raised:
        require_divides(model, shares_of(model), 3)
    assert "num_attention_heads=4; tp=3 does not divide num_key_value_heads=4" in str(raised.value)
    require_divides(model, shares_of(model), 2)


@settings(deadline=None)
@given(shape=st.tuples(st.integers(1, 9), st.integers(1, 9)), ranks=st.integers(1, 5))
def test_boxes_cover_a_tensor_or_are_all_of_it(shape, ranks):
    for cut in (ROWS, Cut(0), Cut(1), Cut(None)):
        boxes = cut.boxes(shape, ranks)
        assert len(boxes) == ranks
        covered = sum(box.num_elements for box in boxes)
        whole = all(box.shape == shape for box in boxes)
        assert covered == (ranks if whole else 1) * shape[0] * shape[1]


def test_what_is_cut_does_not_depend_on_the_degree():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny("qwen2", **FAMILIES["qwen2"]))
    cuts = cuts_of(model, shares_of(model))
    named = {name.replace("model.layers.0.", ""): cut.dim for name, cut in cuts.items()}
    assert {named[f"self_attn.{p}_proj.{w}"] for p in "qkv" for w in ("weight", "bias")} == {0}
    assert (named["self_attn.o_proj.weight"], named["mlp.down_proj.weight"]) == (1, 1)
    assert named["input_layernorm.weight"] is None
    assert named["model.embed_tokens.weight"] == named["lm_head.weight"] == 0
    assert sorted(cuts) == sorted(name for name, _ in model.named_parameters())
