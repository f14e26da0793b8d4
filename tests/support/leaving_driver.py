"""A driver with an engine of two ranks that serves: ``leaving_driver.py vllm|async|sglang``.

It writes ``ready`` once the engine has given tokens, and then waits to be killed.
"""

import sys
import tempfile
from pathlib import Path

from nereus_adapters.rollout.ports import Prompt, Sampling
from nereus_core.cluster import Device
from nereus_core.layout import Layout

DEVICES = (Device("node0", 0), Device("node0", 1))
TP2 = Layout(2, 1)


def on_vllm(front="step"):
    from vllm_cases import Weights

    from nereus_adapters.rollout.vllm.harness import CpuFactory, settings, write_model
    from nereus_core.model import ModelSpec

    folder = write_model(Path(tempfile.mkdtemp(prefix="model-")))
    spec = ModelSpec.from_hf_config(folder, name="actor")
    factory = CpuFactory(settings(folder, front=front), spec, DEVICES)
    return factory, Weights(folder, spec, seed=3).publish(1)


def on_async():
    return on_vllm("async")


def on_sglang():
    from tiny_llama import CONFIG, TinyLlama

    from nereus_adapters.rollout.sglang.factory import SglangEngines

    return SglangEngines(CONFIG, DEVICES, max_tokens=1024), TinyLlama().publish()


def main():
    factory, published = {"vllm": on_vllm, "async": on_async, "sglang": on_sglang}[sys.argv[1]]()
    engine = factory.create("leaving", TP2, DEVICES)
    engine.update_weights(published.version, published.manifest(TP2))
    engine.submit(Prompt("p", (1, 5, 9), Sampling(4, temperature=0.0))).result(60)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
