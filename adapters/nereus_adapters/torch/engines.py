"""Rollout engines beside the seats of a torch job: its generate stage on vLLM or SGLang.

The engines' units are those of `actor/generate`; all other units are the fleet's. Training seats
publish their weights, each the cells that it was assigned; engines read them (see
`nereus_adapters.rollout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from nereus_adapters.rollout.hosts import Hosts
from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.rollout.ports import Completion, Prompt, Sampling
from nereus_adapters.rollout.store import Store
from nereus_adapters.rollout.weights import Piece, Published, assign, cells_bytes
from nereus_adapters.torch.engine import Generated, combine
from nereus_adapters.torch.engine.digest import digest_box
from nereus_adapters.torch.fleet import Fleet
from nereus_core.cluster import Device
from nereus_core.state import Slot, placed
from nereus_core.units import UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, Workload

if TYPE_CHECKING:
    from nereus_adapters.torch.job import TorchJob


class SeatTrainer:
    """The torch job as the engines see it. Implements `nereus_adapters.rollout.source.Trainer`."""

    def __init__(self, running: TorchJob) -> None:
        self._running = running

    @property
    def _fleet(self) -> Fleet:
        return self._running.fleet

    @property
    def units(self) -> UnitMap:
        """Units of all other stages."""
        return self._fleet.units

    @property
    def failed(self) -> frozenset[Device]:
        """Devices whose seats are gone."""
        return self._running.failed

    @property
    def version(self) -> int:
        """Of the weights of training."""
        return int(self._fleet.counters(self.units.of(ACTOR_TRAIN)[0])["weight_version"])

    def publish(self, store: Store) -> None:
        """Let each training seat write its cells; they are the model, each part once."""
        job, version = self._running.job, self.version
        model = job.model(ACTOR_TRAIN)
        units = self.units.of(ACTOR_TRAIN)
        holder = {device: unit.id for unit in units for device in unit.devices}
        held = [part for unit in units for part in placed(model, unit.layout, unit.devices)]
        cells = assign(model, held, len(job.cluster.devices))
        calls, names = {}, []
        fleet = self._fleet
        pieces: list[Piece] = []
        try:
            for device, mine in cells.items():
                names.append(store.hosts.reserve(device, cells_bytes(mine, job.precision.compute)))
                told = {"unit": holder[device], "name": names[-1], "cells": mine}
                calls[device] = ("publish", told)
            for answer in fleet.settle(fleet.pool.send(calls), fleet.timeout_s):
                pieces += answer.value
        except BaseException:
            store.hosts.remove(names)
            raise
        store.add(Published(version, model, job.precision.compute, tuple(pieces)))

    def fail(self, device: Device) -> None:
        """Take no note: the pool has."""

    def take_peaks(self) -> Mapping[Device, int]:
        """Report none: the job reports its own."""
        return {}


def without_generation(workload: Workload) -> Workload:
    """Return what is left of an algorithm for the seats, for whom generation is another's."""
    nodes = tuple(n for n in workload.nodes if n.model_stage != ACTOR_GENERATE)
    return replace(workload, nodes=nodes)


def published_digests(published: Published, hosts: Hosts) -> dict[str, str]:
    """Digest published weights as a training unit's seats digest theirs: parts add up."""
    dtype: torch.dtype = getattr(torch, published.dtype)
    partials = []
    contents = hosts.read(published.pieces)
    for piece, content in zip(published.pieces, contents, strict=True):
        values = torch.frombuffer(bytearray(content), dtype=dtype).view(piece.cell.box.shape)
        partials.append({f"{Slot.PARAM}/{piece.cell.tensor}": digest_box(values, piece.cell.box)})
    return combine(partials)


def generated(
    engines: RolloutJob,
    prompts: list[tuple[int, ...]],
    seeds: list[int],
    *,
    max_tokens: int,
    temperature: float,
    eos_id: int | None,
    name: str,
) -> Generated:
    """Respond to prompts on the engines, in order."""
    stop = () if eos_id is None else (eos_id,)
    asked = [
        Prompt(
            f"{name}/{index}",
            tokens,
            Sampling(max_tokens, temperature, stop_ids=stop, seed=seed),
        )
        for index, (tokens, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    found: list[Completion] = engines.fleet.generate(asked)
    return Generated([list(c.tokens) for c in found], [list(c.logprobs) for c in found])
