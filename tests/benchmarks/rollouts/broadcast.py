"""The usual weight sync, to compare with: every rank gets every whole tensor, by broadcast.

A backend of vLLM's weight-transfer API over a gloo group of the trainer and all ranks, as
frameworks do it with nccl.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from nereus_adapters.rollout.vllm.harness_cpu import CpuExtension
from nereus_adapters.rollout.vllm.transfer import CellsEngine

BACKEND = "gloo-broadcast"


def joined(port: int, rank: int, size: int) -> Any:
    """Join the group of the trainer (rank 0) and all ranks."""
    wait = timedelta(seconds=120)
    store = torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0, wait)
    return torch.distributed.ProcessGroupGloo(store, rank, size, wait)


@dataclass
class Init(WeightTransferInitInfo):
    port: int = 0
    size: int = 0


@dataclass
class Update(WeightTransferUpdateInfo):
    shapes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


class Broadcast(CellsEngine):
    """Receives every tensor whole; loads as `CellsEngine` does."""

    init_info_cls = Init
    update_info_cls = Update
    group: Any = None

    def init_transfer_engine(self, init_info: Init) -> None:
        if init_info.port:
            rank = self.vllm_config.parallel_config.rank + 1
            self.group = joined(init_info.port, rank, init_info.size)

    def receive_weights(self, update_info: Update) -> None:
        self.model.load_weights(self._tensors(update_info))

    def _tensors(self, info: Update) -> Any:
        for name, shape in info.shapes:
            whole = torch.empty(shape)
            self.group.broadcast([whole], torch.distributed.BroadcastOptions()).wait()
            yield name, whole


class BroadcastExtension(CpuExtension):
    """Brings this module into vLLM's workers."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Broadcast)
