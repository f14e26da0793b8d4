"""Nereus's backend of vLLM's weight-transfer API: cells in shared memory, read shard by shard.

Importing this module registers the backend. vLLM's loaders take whole checkpoint tensors and copy
the part of their rank out of them. A rank is given an unfilled tensor of the whole shape with its
own cells in place: on Linux the pages between them are never touched, so they take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from nereus_adapters.rollout.segment import Segment
from nereus_adapters.rollout.weights import Piece

BACKEND = "nereus"


@dataclass
class CellsInit(WeightTransferInitInfo):
    """Nothing is needed beforehand: segments are opened by name."""


@dataclass
class CellsUpdate(WeightTransferUpdateInfo):
    """What one rank reads."""

    version: int
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Sequence[Piece]


class CellsEngine(WeightTransferEngine[CellsInit, CellsUpdate]):
    """Reads a rank's cells from shared memory into its model."""

    init_info_cls = CellsInit
    update_info_cls = CellsUpdate

    def init_transfer_engine(self, init_info: CellsInit) -> None:
        """Need nothing."""

    def start_weight_update(self) -> None:
        """Let layers take checkpoint tensors again."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: CellsUpdate) -> None:
        """Load the rank's cells; they were checked by `check_cells`."""
        self.model.load_weights(whole_tensors(update_info))

    def finish_weight_update(self) -> None:
        """Let layers process what they took (packing, fusing)."""
        finalize_layerwise_reload(self.model, self.model_config)
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            # A head that is tied to the embeddings loads nothing itself, so that vLLM leaves what
            # its kernel was packed from at the start (0.32, CPU).
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Hold nothing."""


def check_cells(pieces: Sequence[Piece], version: int) -> None:
    """Raise GarbledWeights when a piece has not the digest it was published with."""
    with _Opened() as opened:
        for piece in pieces:
            piece.check(opened.view(piece), version)


def whole_tensors(info: CellsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield checkpoint tensors in which this rank's cells are in place."""
    dtype: torch.dtype = getattr(torch, info.dtype)
    with _Opened() as opened:
        for name, pieces in groupby(info.pieces, key=lambda piece: piece.cell.tensor):
            whole = torch.empty(tuple(info.shapes[name]), dtype=dtype)
            for piece in pieces:
                box = piece.cell.box
                place = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
                content = torch.frombuffer(opened.view(piece), dtype=dtype)
                whole[place].copy_(content.view(box.shape))
                del content
            yield name, whole


class _Opened:
    """Segments open while something is read from them."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}

    def view(self, piece: Piece) -> memoryview:
        if piece.segment not in self._segments:
            self._segments[piece.segment] = Segment(piece.segment)
        return self._segments[piece.segment].view(piece.offset, piece.num_bytes)

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *error: object) -> None:
        for segment in self._segments.values():
            segment.close()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, CellsEngine)
