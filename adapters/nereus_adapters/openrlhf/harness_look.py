"""Looks behind a job of the conformance harness: what units hold, wherever it lies now.

State that stands is gathered by DeepSpeed's own means, and an engine's weights are read from the
modules that it computes with. Between primitives, a group that changes lies in Ray's store: what
its ranks have handed out is read from there and put together, and nothing is built in order to
look. What is not there yet is read where it will come from: the reference from its folder, an
engine that was not started from the actor's weights, which it gets when the job is linked.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray

from nereus_adapters.openrlhf import harness_behind
from nereus_adapters.openrlhf.groups import Parked
from nereus_adapters.openrlhf.linking import Linking
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.openrlhf.zero import SLOTS
from nereus_adapters.ray_calls import ask
from nereus_core.cluster import Device
from nereus_core.harness import Array
from nereus_core.units import Unit
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Stage

WAIT_S = 60.0
"""Far above any step or call here; chosen, not measured."""


def held(running: Running, linking: Linking, unit: Unit) -> dict[str, Array]:
    """Return the whole tensors of a unit: ``slot/tensor``."""
    stage = unit.id.model_stage
    if stage == ACTOR_GENERATE:
        return _of_engine(running, unit) if unit.id in running.engines else given(running, linking)
    if (parked := linking.parked(stage)) is None:
        return of_ranks(running, unit, trained=stage.stage is Stage.TRAIN)
    return of_store(parked) if stage.stage is Stage.TRAIN else _of_folder(running)


def given(running: Running, linking: Linking) -> dict[str, Array]:
    """Return what the actor computes with, which is what engines are given."""
    if (parked := linking.parked(ACTOR_TRAIN)) is None:
        return of_ranks(running, running.alive.of(ACTOR_TRAIN)[0], trained=False)
    masters = of_store(parked)
    return {key: _rounded(value) for key, value in masters.items() if key.startswith("param/")}


def _rounded(values: Array) -> Array:
    """Round as DeepSpeed does after each step; bfloat16 as its 16-bit pattern."""
    import torch

    bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16)
    found: Array = bits.numpy().view(np.uint16)
    return found


def of_store(parked: Parked) -> dict[str, Array]:
    """Put together what ranks have handed out to Ray's store.

    Raises:
        AssertionError: some element was handed out by nobody.
    """
    whole: dict[str, Array] = {}
    missing: dict[str, Array] = {}
    for told, refs in parked.shares:
        chunks: list[Mapping[str, Any]] = ray.get(list(refs), timeout=WAIT_S)
        for extent, number in zip(told.extents, told.chunk, strict=True):
            places = _places(*extent.runs())
            for slot, values in zip(SLOTS, chunks[number][extent.name], strict=True):
                key = f"{slot}/{extent.name}"
                tensor = whole.setdefault(key, np.zeros(extent.shape, np.float32))
                tensor.reshape(-1)[places] = values
                left = missing.setdefault(key, np.ones(tensor.size, bool))
                left[places] = False
    if gaps := {key: int(left.sum()) for key, left in missing.items() if left.any()}:
        raise AssertionError(f"elements that no rank has handed out: {gaps}")
    return whole


def _places(starts: Any, lengths: Any) -> Any:
    return np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])


def _of_folder(running: Running) -> dict[str, Array]:
    """Return the weights of the model's folder: those of the reference, which never change."""
    from safetensors.torch import load_file

    found: dict[str, Array] = {}
    for path in sorted(Path(running.args.actor.model_name_or_path).glob("*.safetensors")):
        found |= {f"param/{n}": harness_behind.bits(t) for n, t in load_file(path).items()}
    return found


def _of_engine(running: Running, unit: Unit) -> dict[str, Array]:
    function = harness_behind.worker_parts
    parts = harness_behind.ask_workers(running.engines[unit.id], function, WAIT_S)
    return harness_behind.put_together([pickle.loads(part) for part in parts])


def of_ranks(running: Running, unit: Unit, *, trained: bool) -> dict[str, Array]:
    """Return what the ranks of a unit hold; masters and moments where they are ``trained``."""
    stage = unit.id.model_stage
    # Where ZeRO shares state out, all of the group have to take part.
    handles = running.handles(stage) if trained else [
        running.ranks[stage, device] for device in unit.devices
    ]  # fmt: skip
    found = ask(handles, harness_behind.parts_of, trained, awaited=f"state of {stage}",
                timeout_s=WAIT_S)  # fmt: skip
    if trained:
        at = running.devices_of(stage).index(unit.devices[0])
        found = found[at : at + len(unit.devices)]
    return harness_behind.put_together(found)


def resident_bytes(running: Running, device: Device) -> int:
    """Count the bytes of weights, masters and moments on a device."""
    handles = [handle for key, handle in running.ranks.items() if key[1] == device]
    total = sum(ask(handles, harness_behind.state_bytes, awaited=f"state bytes on {device}",
                    timeout_s=WAIT_S))  # fmt: skip
    for unit_id, engine in running.engines.items():
        devices = running.alive[unit_id].devices
        if device in devices:
            found = harness_behind.ask_workers(engine, harness_behind.worker_bytes, WAIT_S)
            total += found[devices.index(device)]
    return int(total)
