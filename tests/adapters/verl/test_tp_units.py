"""The tensor-parallel engine alone: what it computes is what verl's own engine computes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl_cpu.computed import ULPS, require_alike
from verl_cpu.engines import Case, run_cases
from verl_cpu.models import FAMILIES, randomized, tiny

from nereus_adapters.verl.cuts import ROWS, Cut
from nereus_adapters.verl.fitting import Fitting
from nereus_adapters.verl.resuming import saved_ranks
from nereus_adapters.verl.tensor_parallel.plan import (
    Share,
    cuts_of,
    head_problems,
    require_divides,
    shares_of,
)
from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import Unsupported
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_TRAIN, Job, Stage, grpo

pytestmark = pytest.mark.real

WORLD = 4
CLUSTER = Cluster.homogeneous(1, WORLD, CPU_SEAT, LOOPBACK, LOOPBACK)
BETWEEN_S = 400
"""Four processes on two cores that others use too: chosen, not measured."""


def cases(folder):
    found = []
    for kind, more in FAMILIES.items():
        randomized(AutoModelForCausalLM, tiny(kind, **more)).save_pretrained(folder / kind)
        degrees = [2, 4] if more["num_key_value_heads"] == 4 else [2]
        found += [Case(f"{kind}-verl", str(folder / kind), vendor=None)]
        found += [Case(f"{kind}-{n}", str(folder / kind), n) for n in (1, *degrees)]
    critic = tiny("qwen2", num_labels=1, **FAMILIES["qwen2"])
    randomized(AutoModelForTokenClassification, critic).save_pretrained(folder / "critic")
    at = {"model": str(folder / "critic"), "kind": "value_model"}
    found += [Case("critic-verl", vendor=None, **at), Case("critic-2", degree=2, **at)]
    found += [Case("qwen2-bf16-verl", str(folder / "qwen2"), vendor=None, dtype="bf16")]
    found += [Case("qwen2-bf16-4", str(folder / "qwen2"), 4, dtype="bf16")]
    found += [Case("llama-4", str(folder / "llama"), 4)]
    saved = str(folder / "saved")
    found += [Case("qwen3-saves", str(folder / "qwen3"), 2, saves=saved)]
    found += [Case("qwen3-reads", str(folder / "qwen3"), 2, vendor=None, reads=saved)]
    found += [Case("stock-saves", str(folder / "qwen3"), 2, vendor=None, saves=f"{saved}-stock")]
    packed = {"model": str(folder / "qwen3"), "packed": True}
    found += [Case("qwen3-packed-verl", vendor=None, **packed)]
    found += [Case("qwen3-packed-2", degree=2, **packed)]
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    asked = cases(folder)
    run_cases(folder, asked, WORLD, BETWEEN_S)
    found = {case.name: torch.load(folder / f"{case.name}.pt") for case in asked}
    return found | {"saved": folder / "saved", "saved-stock": folder / "saved-stock"}


PAIRS = [
    *(("qwen2", n) for n in (1, 2, 4)),
    *(("qwen3", n) for n in (1, 2)),
    *(("llama", n) for n in (1, 2)),
    *(("mistral", n) for n in (1, 2, 4)),
    *(("gemma3_text", n) for n in (1, 2)),
    ("qwen3-packed", 2),
    ("critic", 2),
]


@pytest.mark.parametrize(("kind", "degree"), PAIRS)
def test_it_computes_and_learns_what_verls_own_engine_does(outcomes, kind, degree):
    require_alike(outcomes[f"{kind}-{degree}"], outcomes[f"{kind}-verl"])


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
    assert outcomes[f"{kind}-{degree}"]["elements"][0] == (whole - norms) // degree + norms


def test_verls_own_engine_goes_on_from_its_checkpoint_under_nereus(outcomes):
    """As many ranks as saved it, cut otherwise: verl's own loader would not read it."""
    assert torch.equal(outcomes["qwen3-saves"]["after"], outcomes["qwen3-2"]["after"])
    after, read = outcomes["qwen3-saves"]["after"], outcomes["qwen3-reads"]["outputs"]
    assert (after - read).abs().max() <= ULPS * after.abs().max()
    actor = {"actor_rollout_ref": {"actor": {"strategy": "fsdp2"}}}
    workers = SimpleNamespace(workers=[object()] * WORLD)
    trainer = SimpleNamespace(config=OmegaConf.create(actor), actor_rollout_wg=workers)
    assert saved_ranks(trainer, "actor", outcomes["saved"]) == WORLD
    assert saved_ranks(trainer, "actor", outcomes["saved-stock"]) is None


@pytest.mark.parametrize("case", ["qwen2-4", "qwen3-2", "llama-2", "gemma3_text-2"])
def test_what_a_plan_counts_of_a_rank_is_what_it_holds(outcomes, case):
    """Vocabularies that no rank divides and norms are counted whole."""
    kind, degree = case.rsplit("-", 1)
    models = {"actor": SimpleNamespace(num_layers=2)}
    job = Job(grpo(), models, CLUSTER, 8, 8, 8)
    fitting = Fitting(job, {ACTOR_TRAIN: outcomes[case]["facts"]}, None)
    unit = Unit(UnitId(ACTOR_TRAIN, 0), Layout(int(degree), 1), CLUSTER.devices[: int(degree)])
    kept_bytes = fitting.kept_bytes(unit, unit.devices[0])
    counted = kept_bytes / job.precision.kept_bytes(Stage.TRAIN)
    # Parameters that are tied are held once.
    assert counted == outcomes[case]["elements"][0], kind


def test_bf16_is_as_close_to_float32_as_verls_own(outcomes):
    """Outputs before and after training; gradients, as moments of their squares tell."""
    exact, both = outcomes["qwen2-verl"], ("qwen2-bf16-4", "qwen2-bf16-verl")
    for key in ("outputs", "after"):
        ours, verls = ((outcomes[name][key] - exact[key]).abs().max() for name in both)
        assert 0 < ours < 3 * verls, key
    norms = []
    for name in both:
        moments, wanted = outcomes[name]["moments"], exact["moments"]
        strayed = sum(float((moments[n] - wanted[n]).square().sum()) for n in wanted)
        norms.append(strayed)
    assert 0 < norms[0] < 9 * norms[1]


def test_key_value_heads_that_ranks_cannot_share_are_refused_by_name(outcomes):
    assert "tp=4 does not divide num_key_value_heads=2" in outcomes["llama-4"]["error"]


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("gpt2", {}, "no tensor-parallel plan for GPT2LMHeadModel"),
        ("phi3", {"pad_token_id": 0}, "o_proj is to be shared as 'rowwise_split_input'"),
        ("qwen3_moe", {"num_experts": 2, "moe_intermediate_size": 8}, "is to be shared as"),
        ("qwen2_moe", {"num_experts": 2, "moe_intermediate_size": 8}, "experts, num_experts=2"),
        ("phi", {"qk_layernorm": True}, "does not say how model.layers.0.self_attn.q_layernorm"),
        ("phi", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 would drop other numbers on each rank"),
        ("apertus", {}, "does not say how model.layers.0.mlp.act_fn is shared"),
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
    assert [*head_problems({}, 2)] == ["its configuration has no num_attention_heads"]


@pytest.mark.parametrize("kind", ["gpt_neox", "starcoder2", "cohere", "granite", "gemma2"])
def test_what_differs_within_a_plan_that_covers_it_is_taken(kind):
    """Dropout of a classifier that the model has none of, scaled embeddings."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(kind, vocab_size=64, pad_token_id=0))
    shares = shares_of(model)
    require_divides(model, shares, 2)
    kept = [name for name, share in shares.items() if share is Share.WHOLE]
    assert all("norm" in name for name in kept), kept


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
