"""Serving half of the cost model: time to first token and per output token, out of sample.

Kernel curves of the core are fitted on the kernel tables of the training folder; they price each
row (`serving_physics`); what engines and campaigns add is learned from the training rows of
serving_dense.csv by a process over campaigns (`process`). Without a test folder the rows are split
by the hash of their id, registered before the first fit (`serving_rows`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fits import rival
from fits.process import GroupProcess
from fits.score import Score
from fits.serving_physics import Kernels, Physics
from fits.serving_rows import ServingRow, read

RIVAL_S = 240.0
"""Seconds the rival may take; it then has answered for the first rows in the order of their ids'
hashes, and both are scored on those."""
TARGETS: dict[str, tuple[Callable[[ServingRow], float], Callable[[Physics, ServingRow], float]]] = {
    "serving_ttft": (lambda row: row.ttft_s, lambda p, row: p.ttft_s(row)),
    "serving_tpot": (lambda row: row.tpot_s, lambda p, row: p.tpot_s(row)),
}
"""What was measured, and what the curves alone say."""


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """Predictions for some rows, seconds."""

    rows: Sequence[ServingRow]
    measured: np.ndarray
    priced: np.ndarray
    """By the curves alone."""
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def score(self, at: Sequence[int] | None = None) -> Score:
        """Errors of all rows, or of some."""
        pick = slice(None) if at is None else list(at)
        return Score.of(self.mean[pick], self.measured[pick], self.low[pick], self.high[pick])


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What one `predict` was given and found: `details` looks back at the latest."""

    train: Sequence[ServingRow]
    kernels: Kernels
    predicted: dict[str, Predicted]


_runs: list[Run] = []


def predict(train_dir: Path, test_dir: Path | None) -> dict[str, Score]:
    """Fit on one folder, predict the rows of another, or the held-out rows of the same.

    Raises:
        FileNotFoundError: a table is missing.
    """
    rows = read(train_dir)
    train = rows if test_dir else [row for row in rows if not row.held_out]
    test = read(test_dir) if test_dir else [row for row in rows if row.held_out]
    known = {(*_key(row), row.ttft_s, row.tpot_s) for row in test}
    train = [row for row in train if (*_key(row), row.ttft_s, row.tpot_s) not in known]
    kernels = Kernels.fitted(train_dir)
    predicted = {name: predicted_rows(name, train, test, kernels) for name in TARGETS}
    _runs[:] = [Run(train, kernels, predicted)]
    return {name: found.score() for name, found in predicted.items()}


def predicted_rows(
    name: str, train: Sequence[ServingRow], test: Sequence[ServingRow], kernels: Kernels
) -> Predicted:
    """Fit one target on some rows and predict others."""
    measured, price = TARGETS[name]
    seen, new = ([Physics.of(row, kernels) for row in rows] for rows in (train, test))
    priced = np.array([price(p, row) for p, row in zip(seen, train, strict=True)])
    targets = np.log(np.array([measured(row) for row in train]) / priced)
    numbers = {g: i for i, g in enumerate(sorted({_campaign(r) for r in [*train, *test]}))}
    groups = [np.array([float(numbers[_campaign(row)]) for row in rows]) for rows in (train, test)]
    process = GroupProcess.fitted(_features(train, seen), groups[0], targets)
    found = process.predict(_features(test, new), groups[1])
    alone = np.array([price(p, row) for p, row in zip(new, test, strict=True)])
    mean = alone * np.exp(found.mean)
    return Predicted(
        test,
        np.array([measured(row) for row in test]),
        alone,
        mean,
        mean * np.exp(-found.half),
        mean * np.exp(found.half),
    )


def details() -> dict[str, object]:
    """The rival on the same rows, the curves alone, the worst rows, and what was left out."""
    if not _runs:
        return {}
    run = _runs[-1]
    found: dict[str, object] = {"serving_rival": _against_rival(run.predicted)}
    for name, one in run.predicted.items():
        errors = 100 * (one.mean / one.measured - 1)
        found[name] = {
            "train_rows": len(run.train),
            "curves_alone": Score.of(one.priced, one.measured).as_dict(),
            "by_campaign": {
                campaign: one.score(
                    [i for i, row in enumerate(one.rows) if _campaign(row) == campaign]
                ).as_dict()
                for campaign in sorted({_campaign(row) for row in one.rows})
            },
            "worst": [
                {
                    "row": one.rows[i].row_id,
                    "measured_s": round(float(one.measured[i]), 4),
                    "predicted_s": round(float(one.mean[i]), 4),
                    "error_percent": round(float(errors[i]), 1),
                    "inside_interval": bool(one.low[i] <= one.measured[i] <= one.high[i]),
                }
                for i in np.argsort(-np.abs(errors))[:8]
            ],
            "leave_one_out": _left_out(name, run.train, run.kernels),
        }
    return found


def _against_rival(predicted: dict[str, Predicted]) -> dict[str, object]:
    """Score both on the rows the rival answers for, within its time."""
    missing = rival.available()
    if missing:
        return {"skipped": missing}
    rows = next(iter(predicted.values())).rows
    begin_s, answers = time.monotonic(), dict[int, rival.Estimate]()
    for i in sorted(range(len(rows)), key=lambda i: rows[i].order):
        answers.update({i: rival.estimates([rows[i]])[0]})
        if time.monotonic() - begin_s > RIVAL_S:
            break
    answered = [i for i in sorted(answers) if not answers[i].refused]
    if not answered:
        return {"skipped": f"it refused all {len(answers)} rows: {answers[min(answers)].refused}"}
    result: dict[str, object] = {
        "package": "aiconfigurator 0.12",
        "asked": len(answers),
        "refused": len(answers) - len(answered),
    }
    for name, one in predicted.items():
        theirs = [
            answers[i].ttft_s if name == "serving_ttft" else answers[i].tpot_s for i in answered
        ]
        result[name] = {
            "ours": one.score(answered).as_dict(),
            "rival": Score.of(theirs, one.measured[answered]).as_dict(),
        }
    return result


def _left_out(name: str, train: Sequence[ServingRow], kernels: Kernels) -> dict[str, object]:
    """Each model and each system of the training rows, predicted from the others."""
    found: dict[str, object] = {}
    for of in (lambda row: row.spec.name, lambda row: row.system):
        for value in sorted({of(row) for row in train}):
            rest = [row for row in train if of(row) != value]
            gone = [row for row in train if of(row) == value]
            if len(rest) > 2 * len(TARGETS):
                found[value] = predicted_rows(name, rest, gone, kernels).score().as_dict()
    return found


def _key(row: ServingRow) -> tuple[object, ...]:
    """What tells a measurement from others."""
    return row.source, row.backend, row.system, row.model, row.isl, row.osl, row.batch, row.tp


def _campaign(row: ServingRow) -> str:
    return f"{row.source.rpartition('/')[2] or row.source} {row.backend} {row.version} {row.system}"


def _features(rows: Sequence[ServingRow], parts: Sequence[Physics]) -> np.ndarray:
    """Logarithms of what a row asks for and of its regimes: [rows, features]."""
    return np.log(
        [
            [
                row.batch,
                row.isl,
                row.osl,
                row.tp,
                row.spec.num_params,
                p.tpot_s(row),
                p.tpot_s(row) / p.iteration_s,
                row.batch / p.slots,
            ]
            for row, p in zip(rows, parts, strict=True)
        ]
    )
