"""Rollout: a TP change by leasing seats against a stock engine restarted, and weights by shards.

Bar (issue 5): from 2 x TP1 to TP2, until the first token, at least 5 times as fast in place. The
stock engine starts without weights, which is in its favor; ours is timed behind vLLM's AsyncLLM,
too. Weights: bytes and seconds of one sync of a TP2 engine, cells of shards through shared memory
against whole tensors broadcast over gloo.
Runs where vLLM is installed (`tox -e real-vllm`), on CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SYNCED = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
"""33 million parameters, 133 MB: enough that bytes count. Chosen."""


def measured(*, quick: bool) -> dict[str, Any]:
    """Run all parts; seats are shared."""
    from rollouts.changing import leased, restarted, summary
    from rollouts.syncing import broadcast, sharded, weights

    from nereus_adapters.rollout.segment import remove
    from nereus_adapters.rollout.store import publish_here
    from nereus_adapters.rollout.vllm.factory import VllmFactory
    from nereus_adapters.rollout.vllm.harness import TINY, settings, write_model
    from nereus_adapters.rollout.vllm.seat_hosts import OneHost
    from nereus_adapters.rollout.vllm.seats import SeatPool
    from nereus_adapters.rollout.vllm.settings import environment
    from nereus_core.cluster import Device
    from nereus_core.layout import Layout
    from nereus_core.model import ModelSpec
    from nereus_core.state import unit_shards

    devices = (Device("node0", 0), Device("node0", 1))
    rounds = 1 if quick else 3
    # Seats import the rival's backend from beside this file.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        small = write_model(_made(folder, "small"))
        large = write_model(_made(folder, "large"), {**TINY, **SYNCED})
        spec = ModelSpec.from_hf_config(small, name="actor")
        values = weights(spec)
        published = publish_here(
            spec,
            [(devices[0], unit_shards(spec, Layout(1, 1))[0])],
            lambda device, tensor, box: values[tensor][
                tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
            ],
            version=1,
            dtype="float32",
            max_devices=2,
        )
        pool = SeatPool(OneHost("cpu", environment("cpu")))
        try:
            pool.start(devices)
            factory = VllmFactory(settings(small), spec, devices, pool=pool)
            ours = summary(leased(factory, devices, published, rounds=rounds))
            fronted = VllmFactory(settings(small, front="async"), spec, devices, pool=pool)
            behind = summary(leased(fronted, devices, published, rounds=rounds))
            big = ModelSpec.from_hf_config(large, name="actor")
            drawn = weights(big)
            shards = sharded(large, big, pool, devices, drawn, rounds=rounds + 1)
            whole = broadcast(large, big, pool, devices, drawn, rounds=rounds + 1)
        finally:
            pool.close()
            remove(published.segments)
        stock = summary(restarted(small, rounds=rounds))
    return {
        "tp_change": {
            "leased": ours,
            "leased_async_front": behind,
            "restarted": stock,
            "speedup": round(stock["median_s"] / ours["median_s"], 1),
        },
        "weight_sync": {
            "shards": shards,
            "broadcast": whole,
            "bytes_ratio": round(whole["received_bytes"] / shards["received_bytes"], 2),
            "speedup": round(whole["median_s"] / shards["median_s"], 2),
        },
    }


def _made(folder: str, name: str) -> Path:
    path = Path(folder) / name
    path.mkdir()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if find_spec("vllm") is None:
        found: dict[str, Any] = {"skipped": "vLLM is not installed; run it in tox's real-vllm"}
    else:
        found = measured(quick=chosen.quick)
    if chosen.json:
        print(json.dumps(found))
        return
    from rich import print_json

    print_json(data=found)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
