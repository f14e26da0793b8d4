"""vTrain's training plans: the core's counts and curves, a learned residual, conformal intervals.

`predict` is what `cost_model.py` calls; `details` tells of the last call: the splits, the white box
alone, one model or scale left out, and the worst rows with how wide their own interval was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nereus_core.cost.op_classes import FloatArray, IntArray

from .curve_fit import fitted, seconds
from .residual import Residual
from .score import Score
from .vtrain_rows import Rows

SEED = 20261129
"""Of the registered split, fixed before a model was fitted to it."""
FOLDS = 5
_COVERED = 0.9
_MANY = 300
"""Rows from which one fold is enough to calibrate intervals on."""
_WORST = 6
_details: dict[str, dict[str, object]] = {}
_asked_for: dict[str, Callable[[], dict[str, object]]] = {}
"""What is worked out only when somebody asks for details."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Curves and residual fitted to some rows."""

    unknowns: FloatArray
    residual: Residual

    @classmethod
    def to(cls, rows: Rows, near: FloatArray | None = None) -> Fit:
        """Fit the white box, beginning near another where one is given, then what it misses."""
        unknowns = fitted(rows.passes, rows.seconds, near)
        missed = np.log(rows.seconds / seconds(unknowns, rows.passes))
        return cls(unknowns, Residual.fitted(_features(rows), missed))

    def predict(self, rows: Rows) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds, their log's standard deviation, and the white box's seconds alone."""
        alone = seconds(self.unknowns, rows.passes)
        mean, deviation = self.residual.predict(_features(rows))
        return alone * np.exp(mean), deviation, alone


def predict(train: Path, test: Path | None) -> dict[str, Score]:
    """Score both files; without a test folder by the registered split of the training rows."""
    _details.clear()
    _asked_for.clear()
    scores = {}
    for key in ("vtrain_multi", "vtrain_single"):
        name = f"ground_truth_{key.removeprefix('vtrain_')}.csv"
        rows = Rows.read(train / "vtrain" / name)
        if test is None:
            scores[key] = _by_split(key, rows)
        else:
            scores[key] = _held_out(key, rows, Rows.read(_found(test, name)))
    return scores


def details() -> dict[str, object]:
    """What the last `predict` has to say beside its scores."""
    found = {key: _asked_for[key]() if key in _asked_for else {} for key in _details}
    return {key: _details[key] | more for key, more in found.items()}


def _found(folder: Path, name: str) -> Path:
    """A file of the test folder, beside the others or in ``vtrain`` as in the training folder."""
    return folder / name if (folder / name).is_file() else folder / "vtrain" / name


def _features(rows: Rows) -> dict[str, FloatArray]:
    """Doublings of what a plan consists of, in two ways of weighing them."""
    log = {k: np.log2(v) for k, v in rows.columns.items()}
    per_rank = log["layers"] - log["pp"]
    micro_batches = log["batch"] - log["dp"] - log["micro"]
    model = 3 * (log["hidden"] - 11)  # what one model lacks tells little of another
    return {
        "plan": np.stack(
            [log["tp"], log["pp"], log["dp"], log["micro"], model, per_rank, micro_batches], axis=1
        ),
        "place": np.stack(
            [2 * log["tp"], log["pp"], model, log["micro"] / 2, log["devices"] / 2], axis=1
        ),
    }


def _held_out(key: str, rows: Rows, unseen: Rows) -> Score:
    fit = Fit.to(rows)
    guess, deviation, alone = fit.predict(unseen)
    factor = _factor(rows, deviation, fit.unknowns)
    _details[key] = {
        "white_box": Score.of(alone, unseen.seconds).as_dict(),
        "worst": _worst(unseen, guess, alone, factor),
    }
    return Score.of(guess, unseen.seconds, guess / factor, guess * factor)


def _factor(rows: Rows, deviation: FloatArray, near: FloatArray) -> FloatArray:
    """Half-width of the 90% interval as a factor: split conformal over cross-validated misses.

    A miss counts in units of the model's own deviation, floored so that no row is promised to the
    last digit because its neighbors agree.

    Source: Papadopoulos et al. (2002); Barber et al. (2021), CV+.
    """
    order = np.random.default_rng(SEED + 1).permutation(len(rows))
    folds = [order[k::FOLDS] for k in range(FOLDS)]
    scaled, floors = [], []
    for out in folds if len(rows) < _MANY else folds[:1]:
        guess, own, _ = Fit.to(rows.at(np.setdiff1d(order, out)), near).predict(rows.at(out))
        floors.append(float(np.median(own)))
        scaled.append(np.abs(np.log(rows.seconds[out] / guess)) / np.hypot(own, floors[-1]))
    misses = np.concatenate(scaled)
    level = min(1.0, np.ceil((len(misses) + 1) * _COVERED) / len(misses))
    width = np.hypot(deviation, np.median(floors))
    return np.asarray(np.exp(np.quantile(misses, level) * width))


def _by_split(key: str, rows: Rows) -> Score:
    """The registered split is the score; models and scales left out are told as details."""
    n, numbers = len(rows), rows.columns
    order = np.random.default_rng(SEED).permutation(n)
    folds = [order[k::FOLDS] for k in range(FOLDS)]
    guess, factor, alone = np.zeros(n), np.ones(n), np.zeros(n)
    for out in folds:
        guess[out], factor[out], alone[out] = _predicted(rows, out, with_intervals=True)
    score = Score.of(guess, rows.seconds, guess / factor, guess * factor)
    groups: dict[str, Callable[[], FloatArray]] = {
        "model": lambda: numbers["hidden"] * 1000 + numbers["layers"],
        "scale": lambda: numbers["devices"],
    }
    _details[key] = {
        "white_box": Score.of(alone, rows.seconds).as_dict(),
        "worst": _worst(rows, guess, alone, factor),
        "flagged": _flagged(rows, guess, factor),
        "without_worst_rows": _without_worst(rows, guess),
    }
    _asked_for[key] = lambda: {
        f"leave_one_{name}_out": _left_out(rows, of()) for name, of in groups.items()
    }
    return score


def _predicted(
    rows: Rows, out: IntArray, *, with_intervals: bool = False
) -> tuple[FloatArray, FloatArray, FloatArray]:
    rest = rows.at(np.setdiff1d(np.arange(len(rows)), out))
    fit = Fit.to(rest)
    guess, deviation, alone = fit.predict(rows.at(out))
    factor = _factor(rest, deviation, fit.unknowns) if with_intervals else np.ones(len(out))
    return guess, factor, alone


def _left_out(rows: Rows, groups: FloatArray) -> dict[str, object]:
    """Each group predicted from all others."""
    found: dict[str, object] = {}
    for group in np.unique(groups):
        out = np.flatnonzero(groups == group)
        guess, _, alone = _predicted(rows, out)
        found[f"{group:.0f}"] = {
            "white_box": Score.of(alone, rows.seconds[out]).as_dict(),
            "with_residual": Score.of(guess, rows.seconds[out]).as_dict(),
        }
    return found


def _worst(
    rows: Rows, guess: FloatArray, alone: FloatArray, factor: FloatArray
) -> list[dict[str, object]]:
    errors = 100 * np.abs(guess / rows.seconds - 1)
    return [
        {
            "plan": rows.plan(i),
            "measured_s": round(float(rows.seconds[i]), 3),
            "predicted_s": round(float(guess[i]), 3),
            "white_box_s": round(float(alone[i]), 3),
            "error_percent": round(float(errors[i]), 1),
            "interval_percent": round(100 * float(factor[i] - 1), 1),
            "inside_interval": bool(abs(np.log(guess[i] / rows.seconds[i])) <= np.log(factor[i])),
        }
        for i in np.argsort(-errors)[:_WORST]
    ]


def _without_worst(rows: Rows, guess: FloatArray) -> list[float]:
    """MAPE without the worst row, without the worst two, and so on: what single rows cost."""
    errors = np.sort(100 * np.abs(guess / rows.seconds - 1))
    return [round(float(errors[:-n].mean()), 2) for n in range(1, 5)]


def _flagged(rows: Rows, guess: FloatArray, factor: FloatArray) -> dict[str, float]:
    """Errors of the tenth of rows with the widest intervals, and of the others, in percent."""
    errors = 100 * np.abs(guess / rows.seconds - 1)
    wide = factor >= np.quantile(factor, 0.9)
    return {
        "widest_tenth": round(float(errors[wide].mean()), 2),
        "others": round(float(errors[~wide].mean()), 2),
    }
