"""What a change of SGLang rollout engines costs: forked engines against a stock restart, and shards
against a broadcast of the full state. For the environment real-sglang, on a CPU.

One run, one model (a Llama of 47 million parameters in float32, random weights):

- *change*: seconds from the request for an engine of another tp to its first token with the
  trainer's weights. Ours: forked from the stem, weights from shared memory by shards. Stock: a
  process that imports sglang, starts `sglang.Engine` with the same arguments and reads the weights
  from a folder. Bar: >= 5 times as long.
- *sync*: seconds and bytes to bring an engine of tp2 and one of tp1 to new weights. Ours: a rank
  reads the cells it holds. Theirs: SGLang's update from a process group (gloo), in which a trainer
  broadcasts every whole tensor to every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nereus_adapters.rollout.ports import Prompt, Sampling
from nereus_adapters.rollout.segment import remove
from nereus_adapters.rollout.sglang.factory import CPU_ENVIRONMENT, SglangEngines
from nereus_adapters.rollout.sglang.groups import WeightGroups
from nereus_adapters.rollout.sglang.leftovers import SHARED_MEMORY
from nereus_adapters.rollout.sglang.sending import Sender
from nereus_adapters.rollout.store import publish_here
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import unit_shards

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
DEVICES = tuple(Device("here", index) for index in range(3))
MAX_TOKENS, MAX_RUNNING = 2048, 8
STOCK = """
import json, os, sys
if __name__ == "__main__":
    import sglang
    from nereus_adapters.rollout.prctl import end_with_parent
    end_with_parent(os.getppid())  # the benchmark may be killed
    arguments, tokens = json.loads(sys.argv[1])
    engine = sglang.Engine(**arguments)
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    found = engine.generate(input_ids=[tokens], sampling_params=sampling)
    print("FIRST", found[0]["output_ids"][0], flush=True)
    engine.shutdown()
"""
TOKENS = (5, 6, 7, 8)
_LEFT = "sglang_loads_*"
"""Files that a stock engine leaves in shared memory."""


def measure(rounds: int) -> dict[str, Any]:
    """Measure everything in one run."""
    torch.manual_seed(0)
    own = {k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")}
    model = LlamaForCausalLM(LlamaConfig(**own)).float().eval()
    spec = ModelSpec.from_hf_config(CONFIG, name="actor")
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    trainer = Device("trainer", 0)

    def publish(version: int) -> Any:
        return publish_here(
            spec,
            [(trainer, unit_shards(spec, Layout(1, 1))[0])],
            lambda _, name, box: tensors[name].numpy()[tuple(map(slice, box.offset, box.end))],
            version=version,
            dtype="float32",
            max_devices=len(DEVICES),
        )

    with torch.no_grad():
        first = int(model(torch.tensor([TOKENS])).logits[0, -1].argmax())
    engines = SglangEngines(CONFIG, DEVICES, max_tokens=MAX_TOKENS, max_running=MAX_RUNNING)
    published = publish(1)
    names = set(published.segments)
    try:
        start_s = time.perf_counter()
        engines.pool.start()
        stem_s = time.perf_counter() - start_s
        change = {
            f"tp{tp}": _change(engines, published, Layout(tp, 1), first, rounds, model)
            for tp in (2, 1)
        }
        sync, more = _sync(engines, publish, tensors, rounds)
        names |= more
    finally:
        engines.close()
        remove(names)
    return {
        "model_parameters": sum(t.numel() for t in tensors.values()),
        "model_bytes": sum(t.nbytes for t in tensors.values()),
        "cores": len(os.sched_getaffinity(0)),
        "rounds": rounds,
        "stem_start_once_s": stem_s,
        "change": change,
        "sync": sync,
    }


def _first_token(engine: Any) -> int:
    prompt = Prompt("first", TOKENS, Sampling(1, temperature=0.0))
    return int(engine.submit(prompt).result(120).tokens[0])


def _change(
    engines: SglangEngines, published: Any, layout: Layout, first: int, rounds: int, model: Any
) -> dict[str, Any]:
    forked_s = []
    for index in range(rounds):
        start_s = time.perf_counter()
        engine = engines.create(f"{layout}-{index}", layout, DEVICES[: layout.num_devices])
        engine.update_weights(published.version, published.manifest(layout))
        assert _first_token(engine) == first, "the forked engine draws another token"
        forked_s.append(time.perf_counter() - start_s)
        engine.close()
    all_stock_s = [_stock(engines, layout, first, model) for _ in range(rounds)]
    ours_s, stock_s = statistics.median(forked_s), statistics.median(all_stock_s)
    return {
        "forked_s": ours_s,
        "all_forked_s": [round(s, 2) for s in forked_s],
        "stock_restart_s": stock_s,
        "all_stock_s": [round(s, 1) for s in all_stock_s],
        "stock_over_forked": stock_s / ours_s,
    }


def _stock(engines: SglangEngines, layout: Layout, first: int, model: Any) -> float:
    with tempfile.TemporaryDirectory(prefix="nereus-stock-") as folder:
        model.save_pretrained(folder)
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": None}))
        script = Path(folder) / "stock.py"
        script.write_text(STOCK)
        arguments = {
            **engines.arguments(layout),
            "model_path": folder,
            "load_format": "auto",
        }
        environment = engines.environment(DEVICES[: layout.num_devices])
        left: set[Path] = set()
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(script), json.dumps([arguments, TOKENS])],
            env={**os.environ, **CPU_ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("FIRST"):
                    elapsed_s = time.perf_counter() - start_s
                    left = _mapped(process.pid)
                    assert int(line.split()[1]) == first, "the stock engine draws another token"
                    return elapsed_s
            raise RuntimeError("the stock engine did not come up")
        finally:
            process.stdout.read() if process.stdout else None
            process.wait(120)
            for path in left:
                path.unlink(missing_ok=True)


def _mapped(process: int) -> set[Path]:
    """Return the files that a stock engine leaves behind, as its processes have mapped them."""
    stock = psutil.Process(process)
    maps = [m for p in (stock, *stock.children(recursive=True)) for m in p.memory_maps()]
    return {path for m in maps if (path := Path(m.path)).match(f"{SHARED_MEMORY}/{_LEFT}")}


def _sync(
    engines: SglangEngines, publish: Any, tensors: dict[str, torch.Tensor], rounds: int
) -> tuple[dict[str, Any], set[str]]:
    pair = (
        engines.create("sync-tp2", Layout(2, 1), DEVICES[:2]),
        engines.create("sync-tp1", Layout(1, 1), DEVICES[2:]),
    )
    ranks = sum(e.layout.num_devices for e in pair)
    names: set[str] = set()
    shards_s, broadcast_s = [], []
    num_bytes = 0
    groups = WeightGroups(timeout_s=120)
    formed = groups.form([Sender("trainer", tensors)], pair)
    for version in range(2, 2 + rounds):
        start_s = time.perf_counter()
        published = publish(version)
        manifests = [published.manifest(e.layout) for e in pair]
        for engine, manifest in zip(pair, manifests, strict=True):
            engine.update_weights(version, manifest)
        shards_s.append(time.perf_counter() - start_s)
        num_bytes = sum(m.num_bytes for m in manifests)
        names |= set(published.segments)
        start_s = time.perf_counter()
        groups.update(formed, version)
        broadcast_s.append(time.perf_counter() - start_s)
    groups.dissolve(formed)
    for engine in pair:
        engine.close()
    full = ranks * sum(t.nbytes for t in tensors.values())
    ours_s, theirs_s = statistics.median(shards_s), statistics.median(broadcast_s)
    return {
        "engines": [str(e.layout) for e in pair],
        "shards_s": ours_s,
        "shards_bytes_read": num_bytes,
        "broadcast_s": theirs_s,
        "broadcast_bytes_received": full,
        "broadcast_over_shards_s": theirs_s / ours_s,
        "broadcast_over_shards_bytes": full / num_bytes,
    }, names


def show(result: dict[str, Any]) -> None:
    """Print tables."""
    from rich.console import Console
    from rich.table import Table

    table = Table("engine", "forked [s]", "stock restart [s]", "ratio", title="change of tp")
    for name, found in result["change"].items():
        table.add_row(
            name,
            f"{found['forked_s']:.2f}",
            f"{found['stock_restart_s']:.1f}",
            f"{found['stock_over_forked']:.1f}",
        )
    sync = result["sync"]
    second = Table("way", "seconds", "bytes into ranks", title="weights to a tp2 and a tp1 engine")
    second.add_row("shards", f"{sync['shards_s']:.2f}", f"{sync['shards_bytes_read']:,}")
    second.add_row(
        "broadcast", f"{sync['broadcast_s']:.2f}", f"{sync['broadcast_bytes_received']:,}"
    )
    Console().print(table, second)


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    result = measure(chosen.rounds)
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
