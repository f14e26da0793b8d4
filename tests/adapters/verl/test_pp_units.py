"""Pipeline stages of Nereus's own engine, alone: what they compute is what verl's engine does."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl_cpu.computed import ULPS, require_alike
from verl_cpu.engines import Case, run_cases
from verl_cpu.models import FAMILIES, randomized, tiny

from nereus_adapters.verl.fitting import Fitting
from nereus_adapters.verl.pipeline.link import Link
from nereus_adapters.verl.pipeline.schedule import Way, one_forward_one_backward
from nereus_adapters.verl.pipeline.stages import keep, layer_of_each
from nereus_adapters.verl.reading import require_stages
from nereus_adapters.verl.resuming import _saved_names
from nereus_adapters.verl.settings import VerlSettings
from nereus_adapters.verl.tensor_parallel.plan import shares_of
from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import ConfigError, PrimitiveError, Unsupported
from nereus_core.layout import Layout, layer_ranges
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_TRAIN, Job, Stage, grpo

pytestmark = pytest.mark.real

WORLD = 4
CLUSTER = Cluster.homogeneous(1, WORLD, CPU_SEAT, LOOPBACK, LOOPBACK)
BETWEEN_S = 400
"""Four processes on two cores that others use too: chosen, not measured."""
APART = {"tie_word_embeddings": False}
LAYERS = 5
"""No number of stages divides them."""
PAIRS = [
    ("llama", 2, 2),  # degree, stages
    ("llama", 4, 4),
    ("llama", 4, 2),
    ("qwen3", 2, 2),
    ("mistral", 4, 2),
    ("gemma3_text", 2, 2),  # its embeddings are scaled after they have been looked up
    ("qwen3-packed", 2, 2),
    ("critic", 4, 2),
    ("llama-dynamic", 2, 2),
]
"""Kinds of `FAMILIES`, or others: packed without padding, a critic (which computes activations
again), micro-batches cut by tokens."""


def cases(folder):
    found = []
    for kind, more in FAMILIES.items():
        config = tiny(kind, num_hidden_layers=LAYERS, **{**more, **APART})
        randomized(AutoModelForCausalLM, config).save_pretrained(folder / kind)
    critic = tiny("qwen2", num_labels=1, num_hidden_layers=LAYERS, **FAMILIES["qwen2"])
    randomized(AutoModelForTokenClassification, critic).save_pretrained(folder / "critic")
    for kind, degree, stages in PAIRS:
        name, _, way = kind.partition("-")
        model = {"model": str(folder / name), **({way: True} if way else {})}
        model["kind"] = "value_model" if kind == "critic" else "language_model"
        # What follows a sequence's last token is a matter of its micro-batch; where tokens cut
        # those, of how many copies there are: as many are compared with, of the same engine.
        other = {"degree": degree} if way == "dynamic" else {"vendor": None}
        found += [Case(f"{kind}-verl", **other, **model)]
        found += [Case(f"{kind}-{degree}-{stages}", degree=degree, stages=stages, **model)]
    bf16 = {"model": str(folder / "llama"), "dtype": "bf16"}
    found += [Case("llama-bf16-verl", vendor=None, **bf16)]
    found += [Case("llama-bf16-2-2", degree=2, stages=2, **bf16)]
    saved, llama = str(folder / "saved"), str(folder / "llama")
    found += [Case("saves", llama, 4, 2, saves=f"{saved}-stages")]
    found += [Case("reads-2-1", llama, 2, reads=f"{saved}-stages")]
    found += [Case("reads-4-4", llama, 4, 4, reads=f"{saved}-stages")]
    found += [Case("reads-verl", llama, 2, vendor=None, reads=f"{saved}-stages")]
    found += [Case("saves-4", llama, 4, 4, saves=f"{saved}-4")]
    found += [Case("reads-4-by-4", llama, 4, 4, reads=f"{saved}-4")]
    found += [Case("reads-4-by-1", llama, 2, reads=f"{saved}-4")]
    found += [Case("poisoned", llama, 4, 2, poisoned=True)]
    found += [Case("saves-whole", llama, 2, saves=f"{saved}-whole")]
    found += [Case("reads-whole", llama, 2, 2, reads=f"{saved}-whole")]
    tied = tiny("qwen3", **FAMILIES["qwen3"])
    randomized(AutoModelForCausalLM, tied).save_pretrained(folder / "tied")
    found += [Case("tied", str(folder / "tied"), 2, 2)]
    found += [Case("uneven", llama, 4, 3)]
    return list({case.name: case for case in found}.values())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    asked = cases(folder)
    run_cases(folder, asked, WORLD, BETWEEN_S)
    return {case.name: torch.load(folder / f"{case.name}.pt") for case in asked}


@pytest.mark.parametrize(("kind", "degree", "stages"), PAIRS)
def test_stages_compute_and_learn_what_verls_own_engine_does(outcomes, kind, degree, stages):
    require_alike(outcomes[f"{kind}-{degree}-{stages}"], outcomes[f"{kind}-verl"])


def test_a_rank_holds_its_layers_and_no_more(outcomes):
    """Of a copy on four stages every parameter lies on one rank."""
    whole = sum(tensor.numel() for tensor in outcomes["llama-verl"]["weights"].values())
    ranks = outcomes["llama-4-4"]["elements"]
    assert sum(ranks) == whole
    assert max(ranks) < whole / 2


@pytest.mark.parametrize(("kind", "degree", "stages"), PAIRS)
def test_what_a_plan_counts_of_a_rank_is_what_it_holds(outcomes, kind, degree, stages):
    outcome = outcomes[f"{kind}-{degree}-{stages}"]
    model = SimpleNamespace(num_layers=LAYERS)
    job = Job(grpo(), {"actor": model}, CLUSTER, 8, 8, 8)
    fitting = Fitting(job, {ACTOR_TRAIN: outcome["facts"]}, None)
    layout, devices = Layout(degree // stages, stages), CLUSTER.devices[:degree]
    unit, each = (
        Unit(UnitId(ACTOR_TRAIN, 0), layout, devices),
        job.precision.kept_bytes(Stage.TRAIN),
    )
    counted = [fitting.kept_bytes(unit, device) / each for device in devices]
    assert counted == outcome["elements"][:degree]


def test_bf16_is_as_close_to_float32_as_verls_own(outcomes):
    exact = outcomes["llama-verl"]
    for key in ("outputs", "after"):
        ours, verls = (
            (outcomes[f"llama-bf16-{name}"][key] - exact[key]).abs().max()
            for name in ("2-2", "verl")
        )
        assert 0 < ours < 3 * verls, key


@pytest.mark.parametrize(
    ("saver", "reader"),
    [
        ("saves", "reads-2-1"),
        ("saves", "reads-4-4"),
        ("saves", "reads-verl"),
        ("saves-4", "reads-4-by-4"),  # stages with as many parameters each
        ("saves-4", "reads-4-by-1"),
        ("saves-whole", "reads-whole"),
    ],
)
def test_what_some_stages_saved_is_read_by_other_stages_and_none(outcomes, saver, reader):
    saved, read = outcomes[saver], outcomes[reader]
    assert "error" not in read, read
    scale = saved["after"].abs().max()
    assert (saved["after"] - read["outputs"]).abs().max() <= ULPS * scale
    assert sorted(read["moments"]) == sorted(saved["moments"])
    for name, moment in saved["moments"].items():
        assert torch.equal(read["moments"][name], moment), name


def test_moments_of_stages_without_a_model_file_are_refused_by_name(tmp_path):
    with pytest.raises(PrimitiveError, match=r"rank 1 saved moments of 2 of 3 .*save_contents"):
        _saved_names(["a", "b", "c"], 2, tmp_path, 4, 1)


def test_a_gradient_that_is_not_finite_on_one_stage_skips_the_step_of_all(outcomes):
    told = outcomes["poisoned"]["poisoned"]
    assert len(told) == WORLD
    assert all(not math.isfinite(norm) and same for norm, same in told), told


@pytest.mark.parametrize(
    ("precision", "contents", "said"),
    [
        ("fp16", ["model"], "fp16 scales the loss"),
        ("bf16", ["model", "hf_model"], "has hf_model"),
        ("bf16", ["optimizer", "extra"], "optimizer without model"),
        ("bf16", ["optimizer", "model"], None),
    ],
)
@pytest.mark.filterwarnings("ignore:.* engine is not available")  # verl's, where it is imported
def test_options_that_stages_do_not_go_with_are_named(precision, contents, said):
    from nereus_adapters.verl.pipeline.engine import Pipelined

    with torch.device("meta"):
        config = tiny("llama", num_key_value_heads=4, vocab_size=64)
        model = AutoModelForCausalLM.from_config(config)
    engine = SimpleNamespace(
        engine_config=SimpleNamespace(mixed_precision={"param_dtype": precision}),
        checkpoint_config=SimpleNamespace(save_contents=contents),
        layers=layer_of_each(model),
    )
    found = Pipelined._unpipelined(engine, model)
    assert found is None if said is None else said in found


def test_a_model_whose_head_is_its_embedding_is_refused_by_name(outcomes):
    assert "lm_head.weight" in outcomes["tied"]["error"]
    assert "tie_word_embeddings" in outcomes["tied"]["error"]


def test_stages_that_do_not_divide_a_copys_ranks_are_refused(outcomes):
    said = outcomes["uneven"]["error"]
    assert "the actor's units have 4 ranks (fsdp_size), and 3 stages (nereus.backend" in said


@pytest.mark.parametrize("kind", ["gpt2", "phi"])
def test_models_without_a_plan_for_stages_are_refused_by_name(kind):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(kind, vocab_size=64))
    if kind == "phi":
        model.config.base_model_pp_plan = {"embed_tokens": (["input_ids"], ["inputs_embeds"])}
    said = "no pipeline plan for GPT2LMHeadModel" if kind == "gpt2" else "does not say where"
    with pytest.raises(Unsupported, match=said):
        layer_of_each(model)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "granite", "cohere", "gemma2"])
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_one_after_the_other_are_the_model(kind, stages):
    """Without sending: scaled embeddings, residuals and logits, masks that differ by layer."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "num_key_value_heads": 4, "num_hidden_layers": LAYERS}
    config = tiny(kind, pad_token_id=0, **sizes, **APART)
    config._attn_implementation = "eager"
    whole = AutoModelForCausalLM.from_config(config).eval()
    if kind in ("gemma2", "cohere"):  # they tie whatever they are told
        whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.clone())
    tokens = torch.randint(0, 64, (2, 7))
    shares_of(whole)  # the engine asks it of every model, whatever its degree
    places = layer_of_each(whole)
    state = whole.state_dict()
    carried = []

    class Direct(Link):
        """Hands over within one process."""

        def __init__(self):
            self.came = self.leaves = None

        def receive(self, tokens):
            assert tuple(tokens) == (2, 7)
            self.came = carried.pop()
            return self.came

    for layers in layer_ranges(LAYERS, stages):
        part = AutoModelForCausalLM.from_config(config).eval()
        if kind in ("gemma2", "cohere"):
            part.lm_head.weight = torch.nn.Parameter(part.lm_head.weight.clone())
        part.load_state_dict(state)
        link = Direct()
        keep(part, layers, link)
        mine = {name for name, _ in part.named_parameters()}
        assert mine == {name for name, layer in places.items() if layer in layers}
        with torch.no_grad():
            found = part(input_ids=tokens, use_cache=False).logits
        if layers.stop < LAYERS:
            carried.append(link.leaves)
    with torch.no_grad():
        assert torch.equal(found, whole(input_ids=tokens, use_cache=False).logits)


def sent_and_not_taken(done, stage, stages):
    def count(of, way):
        return sum(1 for s, w, _ in done if (s, w) == (of, way))

    found = 0
    if stage < stages - 1:
        found += count(stage, Way.FORWARD) - count(stage + 1, Way.FORWARD)
    if stage > 0:
        found += count(stage, Way.BACKWARD) - count(stage - 1, Way.BACKWARD)
    return found


@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_stages_never_wait_for_each_other_in_a_ring(stages, micro_batches):
    """Every order runs to its end, and holds as few micro-batches as it says.

    What a stage has sent and the others have not taken is never more than `Link.send` waits for.
    """
    orders = [[*one_forward_one_backward(s, stages, micro_batches)] for s in range(stages)]
    at, done = [0] * stages, set()
    while any(at[s] < len(order) for s, order in enumerate(orders)):
        before = list(at)
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                way, index = order[at[stage]]
                needs = (stage - 1, way, index) if way is Way.FORWARD else (stage + 1, way, index)
                if 0 <= needs[0] < stages and needs not in done:
                    break
                done.add((stage, way, index))
                at[stage] += 1
                assert sent_and_not_taken(done, stage, stages) <= 2 * stages
        assert at != before, "a ring"
    for stage, order in enumerate(orders):
        assert len(order) == len(set(order)) == 2 * micro_batches
        assert [i for way, i in order if way is Way.BACKWARD] == [*range(micro_batches)]
        held = [
            sum(1 if way is Way.FORWARD else -1 for way, _ in order[: n + 1])
            for n in range(len(order))
        ]
        assert min(held) >= 0
        assert max(held) <= stages - stage


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pipeline_stages": 2}, "engine=tp"),
        ({"engine": "tp", "pipeline_stages": 4, "max_pipeline_stages": 2}, "is less than"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        VerlSettings.of(keys)


def test_plans_with_stages_of_a_model_that_has_none_are_refused():
    settings = VerlSettings.of({"engine": "tp", "max_pipeline_stages": 2})
    alone = Layout(2, 1)
    actor, ref = (SimpleNamespace(role=r, layout=alone, unpipelined=None) for r in ("actor", "ref"))
    require_stages(SimpleNamespace(engines=(actor, ref)), settings)
    ref.unpipelined = "tied"
    require_stages(SimpleNamespace(engines=(actor, ref)), settings)  # the actor may yet
    actor.unpipelined = "tied"
    with pytest.raises(ConfigError, match="no engine can have stages; the actor's: tied"):
        require_stages(SimpleNamespace(engines=(actor, ref)), settings)
    settings = VerlSettings.of({"engine": "tp", "pipeline_stages": {"ref": 2}})
    with pytest.raises(ConfigError, match="it is 2 for the ref, which started with 1"):
        require_stages(SimpleNamespace(engines=(actor, ref)), settings)
