"""Refusals of shapes and rates that cannot be, so that no plan is chosen on nonsense."""

from __future__ import annotations

import math

import numpy as np

from nereus_core.cost.op_classes import Column
from nereus_core.errors import CostInputError


def require_rate(what: str, value: float) -> float:
    """Return a peak rate that is positive and finite.

    Raises:
        CostInputError: it is zero, negative, infinite or not a number.
    """
    if not (0 < value < math.inf):
        raise CostInputError(what, value, "a positive finite rate")
    return value


def require_sizes(what: str, value: Column) -> None:
    """Refuse counts and sizes that are negative or not a number.

    Raises:
        CostInputError: with the smallest of them.
    """
    sizes = np.asarray(value)
    least = float(sizes.min()) if sizes.size else 0.0
    if not least >= 0:
        raise CostInputError(what, least, "zero or more")
