"""Score: how far predictions were from what was measured, in percent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Score:
    """Absolute percentage errors of one set of rows, and how often an interval held the truth."""

    n: int
    mape: float
    p50: float
    p90: float
    max: float
    coverage: float
    """Rows whose measured value lay inside the stated 90% interval; NaN where none was stated."""

    @classmethod
    def of(
        cls,
        predicted: ArrayLike,
        measured: ArrayLike,
        low: ArrayLike | None = None,
        high: ArrayLike | None = None,
    ) -> Self:
        """Compare row by row; all arguments have the same length.

        Args:
            predicted: positive predictions.
            measured: what was measured, in the same unit.
            low: lower ends of the 90% intervals.
            high: their upper ends.

        Raises:
            ValueError: there are no rows, or a value is not finite and positive.
        """
        guess, truth = np.asarray(predicted, float), np.asarray(measured, float)
        if not len(truth):
            raise ValueError("no rows to score; expected at least one")
        for name, values in (("predicted", guess), ("measured", truth)):
            wrong = ~(np.isfinite(values) & (values > 0))
            if wrong.any():
                raise ValueError(f"{name} row {wrong.argmax()} is {values[wrong][0]}; expected > 0")
        errors = 100 * np.abs(guess / truth - 1)
        inside = np.nan
        if low is not None and high is not None:
            inside = 100 * float(((np.asarray(low) <= truth) & (truth <= np.asarray(high))).mean())
        p50, p90 = np.percentile(errors, [50, 90])
        return cls(
            len(truth), float(errors.mean()), float(p50), float(p90), float(errors.max()), inside
        )

    def as_dict(self) -> dict[str, float | None]:
        """The same as a plain mapping; what is not known is None."""
        return {k: None if np.isnan(v) else v for k, v in asdict(self).items()}
