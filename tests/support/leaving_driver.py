"""A driver with an engine of two ranks that serves: ``leaving_driver.py vllm|async|sglang``.

It writes ``ready`` once the engine has given tokens, and then waits to be killed. It imports no
more than an engine needs, and its weights are noise.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from nereus_adapters.rollout.ports import Prompt, Sampling
from nereus_adapters.rollout.store import publish_here
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import unit_shards

DEVICES = (Device("node0", 0), Device("node0", 1))
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def engines(kind, spec):
    if kind == "sglang":
        from nereus_adapters.rollout.sglang.factory import SglangEngines

        return SglangEngines(CONFIG, DEVICES, max_tokens=1024)
    from nereus_adapters.rollout.vllm.factory import VllmFactory
    from nereus_adapters.rollout.vllm.settings import VllmSettings

    folder = Path(tempfile.mkdtemp(prefix="model-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = VllmSettings(
        folder,
        max_tokens=64,
        kv_cache_bytes=8 * 2**20,
        eager=True,
        front="async" if kind == "async" else "step",
    )
    return VllmFactory(settings, spec, DEVICES)


def main():
    spec = ModelSpec.from_hf_config(CONFIG, name="actor")
    noise = np.random.default_rng(0)
    published = publish_here(
        spec,
        [(DEVICES[0], unit_shards(spec, Layout(1, 1))[0])],
        lambda device, tensor, box: noise.standard_normal(box.shape, np.float32),
        version=1,
        dtype="float32",
        max_devices=2,
    )
    layout = Layout(2, 1)
    engine = engines(sys.argv[1], spec).create("leaving", layout, DEVICES)
    engine.update_weights(1, published.manifest(layout))
    engine.submit(Prompt("p", (1, 5, 9), Sampling(4, temperature=0.0))).result(60)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
