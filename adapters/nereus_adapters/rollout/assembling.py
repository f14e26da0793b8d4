"""Assembling: the boxes that ranks hold, laid into whole arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_core.model import ModelSpec
from nereus_core.state import slots_of, tensor_rules
from nereus_core.workload import Stage

Arrays = dict[str, NDArray[np.float32]]
"""By ``slot/tensor``, or by tensor."""
Part = tuple[tuple[int, ...], NDArray[np.float32]]
"""Where a part lies in its tensor, and its values."""


def assembled(model: ModelSpec, stage: Stage, ranks: Sequence[Mapping[str, Part]]) -> Arrays:
    """Lay ranks' boxes into whole arrays, ``slot/tensor`` by name.

    Raises:
        AssertionError: two ranks hold different bits of one part, or nobody holds it.
    """
    whole: Arrays = {}
    for key, shape in _keys(model, stage):
        array, seen = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for rank, parts in enumerate(ranks):
            if key not in parts:
                continue
            offset, values = parts[key]
            place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            twice = seen[place]
            if not np.array_equal(array[place][twice], values[twice]):
                raise AssertionError(f"{key}: rank {rank} differs from a rank before it")
            array[place], seen[place] = values, True
        if not seen.all():
            raise AssertionError(f"{key}: ranks do not hold all of it")
        whole[key] = array
    return whole


def _keys(model: ModelSpec, stage: Stage) -> Iterator[tuple[str, tuple[int, ...]]]:
    for slot in slots_of(stage):
        for rule in tensor_rules(model):
            yield f"{slot}/{rule.name}", rule.shape
