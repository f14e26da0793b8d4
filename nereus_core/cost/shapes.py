"""What a layout makes of a model's shapes: parameters, work and bytes per device, for many layouts.

Everything is exact arithmetic on shapes, over columns of options, and follows the state map
(`state.tensor_rules`): kv heads are replicated above their number, a vocabulary is cut into
ceil(V/tp) rows, layers into runs that differ by one. Symbols as in `model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from nereus_core.cost.op_classes import BoolArray, FloatArray, IntArray
from nereus_core.model import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Ways to lay out one model-stage, one per row; ``*_crosses`` says where nodes are crossed."""

    tp: IntArray
    pp: IntArray
    dp: IntArray
    tp_crosses: BoolArray
    pp_crosses: BoolArray
    dp_crosses: BoolArray
    dp_rails: IntArray | None = None
    """Units of a gradient ring that share a node, where they do; None: one each."""

    def __len__(self) -> int:
        return len(self.tp)

    @classmethod
    def within_node(cls, tp: IntArray, pp: IntArray, dp: IntArray) -> Self:
        """Options none of whose groups crosses a node."""
        no = np.zeros(len(tp), dtype=np.bool_)
        return cls(tp, pp, dp, no, no, no)

    def take(self, rows: IntArray | slice) -> Self:
        """Return some of the rows."""
        return type(self)(
            self.tp[rows],
            self.pp[rows],
            self.dp[rows],
            self.tp_crosses[rows],
            self.pp_crosses[rows],
            self.dp_crosses[rows],
            None if self.dp_rails is None else self.dp_rails[rows],
        )

    @property
    def num_devices(self) -> IntArray:
        """Devices each option takes."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, eq=False)
class RankShapes:
    """Elements that the fullest rank of a unit holds or works on; one row per option."""

    layers: FloatArray
    """Decoder layers of the longest pipeline run: ceil(L/pp)."""
    matrix: FloatArray
    """Elements of one layer's matrices on one rank."""
    kv: FloatArray
    """Elements of one token's keys (or values) in one layer on one rank."""
    query: FloatArray
    intermediate: FloatArray
    vocab: FloatArray
    """Rows of the vocabulary on one rank."""
    params: FloatArray
    """All parameters of the fullest rank."""

    @classmethod
    def of(cls, model: ModelSpec, options: Options, *, by_rows: bool = False) -> Self:
        """Cut a model's shapes by tp and pp; ``by_rows`` whatever heads there are (FSDP)."""
        tp, pp = options.tp.astype(np.float64), options.pp
        h, d = model.hidden, model.head_dim
        query = model.num_heads * d / tp
        # Fewer kv heads than ranks: one each, where heads are what is cut.
        kv = np.maximum(model.num_kv_heads / tp, 0.0 if by_rows else 1.0) * d
        intermediate = model.intermediate / tp
        vocab = np.ceil(model.vocab / tp)
        matrix = 2 * h * query + 2 * h * kv + 3 * h * intermediate
        norms = (2 if model.norm_style == "pre" else 4) * h + 2 * d * model.qk_norm
        layer = matrix + norms + (query + 2 * kv) * model.qkv_bias
        # First rank: embeddings. Last rank: final norm and head (tied: the embeddings again).
        embed = vocab * h
        head = h + (float(h) if model.head == "value" else embed)
        short, longer = model.num_layers // pp, np.ceil(model.num_layers / pp)
        one_rank = embed + h + model.num_layers * layer
        if model.head == "value":
            one_rank = one_rank + h
        elif not model.tied_embeddings:
            one_rank = one_rank + embed
        ends = np.maximum(longer * layer + embed, short * layer + head)
        params = np.where(pp == 1, one_rank, ends)
        return cls(longer, matrix, kv, query, intermediate, vocab, params)

    def take(self, rows: IntArray) -> Self:
        """Return some of the rows."""
        return type(self)(
            self.layers[rows],
            self.matrix[rows],
            self.kv[rows],
            self.query[rows],
            self.intermediate[rows],
            self.vocab[rows],
            self.params[rows],
        )
