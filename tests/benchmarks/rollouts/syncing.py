"""Weight sync of a TP2 engine from a TP2 trainer: cells of shards against whole tensors."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nereus_adapters.rollout.segment import remove
from nereus_adapters.rollout.store import publish_here
from nereus_adapters.rollout.vllm.factory import VllmFactory
from nereus_adapters.rollout.vllm.harness import settings
from nereus_adapters.rollout.vllm.seats import SeatPool
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import Box, tensor_rules, unit_shards

TWO = Layout(2, 1)


def weights(spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """Return random weights of a model."""
    drawn = np.random.default_rng(0)
    return {
        r.name: drawn.standard_normal(r.shape, np.float32) * np.float32(0.02)
        for r in tensor_rules(spec)
    }


def sharded(
    model: Path,
    spec: ModelSpec,
    pool: SeatPool,
    devices: tuple[Device, ...],
    values: dict[str, NDArray[np.float32]],
    *,
    rounds: int,
) -> dict[str, Any]:
    """Publish shards, and let each rank read its own."""
    held = list(zip(devices, unit_shards(spec, TWO), strict=True))
    shards = {d: {n: values[n][_place(b)].copy() for n, b in shard.items()} for d, shard in held}

    def read(device: Device, tensor: str, box: Box) -> NDArray[np.generic]:
        return shards[device][tensor][box.within(dict(held)[device][tensor])]

    engine = VllmFactory(settings(model), spec, devices, pool=pool).create("shards", TWO, devices)
    seconds, manifest = [], None
    for version in range(1, rounds + 1):
        begin_s = time.perf_counter()
        published = publish_here(spec, held, read, version=version, dtype="float32", max_devices=2)
        manifest = published.manifest(TWO)
        engine.update_weights(version, manifest)
        seconds.append(time.perf_counter() - begin_s)
        remove(published.segments)
    engine.close()
    assert manifest is not None
    return {
        "sent_bytes": published.num_bytes,
        "received_bytes": manifest.num_bytes,
        "median_s": sorted(seconds)[len(seconds) // 2],
        "all_s": [round(s, 3) for s in seconds],
    }


def broadcast(
    model: Path,
    spec: ModelSpec,
    pool: SeatPool,
    devices: tuple[Device, ...],
    values: dict[str, NDArray[np.float32]],
    *,
    rounds: int,
) -> dict[str, Any]:
    """Gather whole tensors from the shards, and broadcast each to every rank."""
    from rollouts.broadcast import BACKEND, joined

    held = list(zip(devices, unit_shards(spec, TWO), strict=True))
    shards = {d: {n: values[n][_place(b)].copy() for n, b in shard.items()} for d, shard in held}
    chosen = settings(
        model,
        extension="rollouts.broadcast.BroadcastExtension",
        more={"weight_transfer_config": {"backend": BACKEND}},
    )
    engine = VllmFactory(chosen, spec, devices, pool=pool).create("broadcast", TWO, devices)
    port = pool.hosts.of("node0").free_port()
    groups: list[Any] = []
    joining = threading.Thread(target=lambda: groups.append(joined(port, 0, 3)))
    joining.start()
    engine.rpc("init_weight_transfer_engine", init_info={"port": port, "size": 3})
    joining.join()
    listing = [(r.name, r.shape) for r in tensor_rules(spec)]
    seconds = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        engine.rpc("start_weight_update")
        sending = threading.Thread(target=_send, args=(groups[0], spec, held, shards))
        sending.start()
        engine.rpc("update_weights", update_info={"shapes": listing})
        sending.join()
        engine.rpc("finish_weight_update")
        seconds.append(time.perf_counter() - begin_s)
    engine.close()
    whole = sum(v.nbytes for v in values.values())
    gathered = sum(a.nbytes for a in shards[devices[1]].values())
    return {
        "sent_bytes": gathered + whole,
        "received_bytes": whole * TWO.num_devices,
        "median_s": sorted(seconds)[len(seconds) // 2],
        "all_s": [round(s, 3) for s in seconds],
    }


def _send(group: Any, spec: ModelSpec, held: Any, shards: Any) -> None:
    for rule in tensor_rules(spec):
        whole = torch.empty(rule.shape)
        for device, shard in held:
            if rule.name in shard:
                whole[_place(shard[rule.name])] = torch.from_numpy(shards[device][rule.name])
        group.broadcast([whole], torch.distributed.BroadcastOptions()).wait()


def _place(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
