"""Fit the core's kernel curves to measured tables: robust least squares of log seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fits.kernel_tables import HEAD_DIM, Table
from nereus_core.cluster import DeviceSpec, LinkSpec
from nereus_core.cost.kernels import (
    Collective,
    DecodeCurve,
    GemmCurve,
    MessageCurve,
    PrefillCurve,
)

OUTLIER = 0.1
"""Log residual beyond which a row pulls linearly (soft l1); chosen, not measured."""
MAX_ROWS = 10_000
"""Rows of a table that a fit looks at, drawn with a seed; more change no third digit."""
STARTS: Mapping[type, Mapping[str, float]] = {
    GemmCurve: {
        "compute_fraction": 0.7,
        "bandwidth_fraction": 0.7,
        "launch_s": 3e-6,
        "m_half": 50.0,
        "n_half": 50.0,
        "k_half": 100.0,
    },
    PrefillCurve: {
        "compute_fraction": 0.6,
        "bandwidth_fraction": 0.4,
        "launch_s": 1e-5,
        "rows_half": 1e4,
    },
    DecodeCurve: {
        "bandwidth_fraction": 0.8,
        "launch_s": 1e-5,
        "head_s": 2e-9,
        "token_s": 5e-10,
    },
    MessageCurve: {"start_s": 6e-6, "hop_s": 1e-6, "bandwidth_fraction": 0.8, "chunk_s": 5e-5},
}
"""Where each parameter starts; all are positive and fitted as logarithms."""
CAPS = {"compute_fraction": 1.0, "bandwidth_fraction": 1.0}
"""No part of a peak exceeds it."""
FLOORS = 1e-15
"""What a parameter that vanishes ends at."""

Predict = Callable[[Any, Table], np.ndarray]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A curve and how it predicts a table."""

    curve: Any
    predict: Predict


def fit(kind: type, table: Table, predict: Predict, **fixed: object) -> Fitted:
    """Fit all parameters of a curve to the rows of a table."""
    rows = table
    if len(table) > MAX_ROWS:
        rows = table.rows(np.random.default_rng(0).choice(len(table), MAX_ROWS, replace=False))
    names, target = list(STARTS[kind]), np.log(rows.seconds)

    def curve(log: np.ndarray) -> Any:
        values = {n: float(v) for n, v in zip(names, np.exp(log), strict=True)}
        return kind(**values, **fixed, source=table.file)

    found = least_squares(
        lambda log: np.log(predict(curve(log), rows)) - target,
        np.log([STARTS[kind][n] for n in names]),
        bounds=(np.log(FLOORS), np.log([CAPS.get(n, 1e9) for n in names])),
        loss="soft_l1",
        f_scale=OUTLIER,
    )
    return Fitted(curve(found.x), predict)


def fit_gemm(table: Table, spec: DeviceSpec, each_bytes: float) -> Fitted:
    """Fit products of one precision; ``spec`` has that precision's peak."""

    def predict(curve: GemmCurve, t: Table) -> np.ndarray:
        return curve.seconds(spec, t.columns["m"], t.columns["n"], t.columns["k"], each_bytes)

    return fit(GemmCurve, table, predict)


def fit_attention(kind: type, table: Table, spec: DeviceSpec) -> Fitted:
    """Fit attention in bfloat16: `PrefillCurve` or `DecodeCurve`."""

    def predict(curve: PrefillCurve | DecodeCurve, t: Table) -> np.ndarray:
        c = t.columns
        return curve.seconds(spec, c["sequences"], c["tokens"], c["query"], c["kv"], HEAD_DIM, 2.0)

    return fit(kind, table, predict)


def fit_message(table: Table, link: LinkSpec, what: Collective) -> Fitted:
    """Fit one collective over one kind of link."""

    def predict(curve: MessageCurve, t: Table) -> np.ndarray:
        return curve.seconds(link, what, t.columns["ranks"], t.columns["bytes"])

    return fit(MessageCurve, table, predict, overlap=2.0)
