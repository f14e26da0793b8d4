"""Alike: whether units of one layout hold the same state, compared where it lies."""

from __future__ import annotations

from collections.abc import Sequence

from nereus_adapters.torch.fleet import Fleet
from nereus_core.errors import Diverged
from nereus_core.units import Unit


def require_alike(op: object, units: Sequence[Unit], fleet: Fleet, timeout_s: float) -> None:
    """Raise Diverged unless the same local ranks of units of one layout hold the same bits.

    All seats work at once, each at the speed of its memory; a fingerprint, which does not depend
    on the layout, takes about twenty times as long.
    """
    answers = fleet.settle(fleet.send({u.id: {} for u in units}, "sums"), timeout_s)
    per_unit = units[0].layout.num_devices
    for index, answer in enumerate(answers):
        for name, value in answers[index % per_unit].value.items():
            if answer.value[name] != value:
                raise Diverged([u.id for u in units], name, op)
