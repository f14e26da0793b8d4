import json

import pytest

from nereus_core.errors import ModelConfigError
from nereus_core.model import ModelSpec
from nereus_core.sim.models import LLAMA_3_1_8B, QWEN2_5_7B, TINY
from nereus_core.state import tensor_rules

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def test_llama_config_gives_its_shapes():
    spec = ModelSpec.from_hf_config(LLAMA, name="smollm2")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert spec.tied_embeddings
    assert spec.num_params == 134_515_008  # SmolLM2-135M's published parameter count


@pytest.mark.parametrize(
    ("spec", "num_params"), [(LLAMA_3_1_8B, 8_030_261_248), (QWEN2_5_7B, 7_615_616_512)]
)
def test_known_models_have_their_published_parameter_counts(spec, num_params):
    assert spec.num_params == num_params


@pytest.mark.parametrize("field", [f for f in LLAMA if f not in ("tie_word_embeddings",)])
def test_a_missing_field_is_named(field):
    config = {k: v for k, v in LLAMA.items() if k != field}
    if field == "num_key_value_heads":  # absent means one kv head per head (multi-head attention)
        assert ModelSpec.from_hf_config(config).num_kv_heads == 9
        return
    with pytest.raises(ModelConfigError, match=field):
        ModelSpec.from_hf_config(config)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "big"}, "vocab_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"model_type": "mamba"}, "model_type"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_size": 577}, "head_dim"),
    ],
)
def test_a_wrong_value_names_its_field(changes, field):
    with pytest.raises(ModelConfigError) as caught:
        ModelSpec.from_hf_config({**LLAMA, **changes})
    assert caught.value.field == field


def test_families_differ_where_their_code_does():
    qwen2 = ModelSpec.from_hf_config({**LLAMA, "model_type": "qwen2"})
    qwen3 = ModelSpec.from_hf_config({**LLAMA, "model_type": "qwen3", "head_dim": 128})
    gemma = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"} | {
        "model_type": "gemma2",
        "head_dim": 256,
    }
    gemma2 = ModelSpec.from_hf_config(gemma)
    assert qwen2.qkv_bias
    assert qwen3.qk_norm
    assert qwen3.head_dim == 128
    assert gemma2.norm_style == "sandwich"
    assert gemma2.tied_embeddings  # Gemma ties by default; the field is often left out


def test_gemma3_reads_its_text_config():
    text = {**LLAMA, "model_type": "gemma3_text", "head_dim": 64}
    spec = ModelSpec.from_hf_config({"model_type": "gemma3", "text_config": text})
    assert (spec.family, spec.qk_norm) == ("gemma3_text", True)


def test_config_is_read_from_file_or_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelSpec.from_hf_config(tmp_path) == ModelSpec.from_hf_config(tmp_path / "config.json")
    with pytest.raises(ModelConfigError, match="cannot read"):
        ModelSpec.from_hf_config(tmp_path / "absent.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="not JSON"):
        ModelSpec.from_hf_config(tmp_path)


@pytest.mark.parametrize("spec", [TINY, LLAMA_3_1_8B, QWEN2_5_7B, TINY.as_critic("critic")])
def test_state_map_holds_every_parameter_once(spec):
    total = 0
    for rule in tensor_rules(spec):
        elements = 1
        for n in rule.shape:
            elements *= n
        total += elements
    assert total == spec.num_params
