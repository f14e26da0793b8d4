"""Weight synchronisation on a seat: a unit's parameters are overwritten in place, no staging."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nereus_adapters.torch.engine import Group, UnitShard
from nereus_adapters.torch.exchange import Garbled, exchange
from nereus_adapters.torch.transfer import reader
from nereus_adapters.torch.values import SyncPart
from nereus_core.state import Box, Slot
from nereus_core.units import UnitId

TORN = -1
"""Weight version of a unit whose synchronisation did not end; nothing may be read from it."""


def synchronize(
    part: SyncPart,
    version: int,
    units: Mapping[UnitId, UnitShard],
    group: Group | None,
    device: torch.device,
) -> None:
    """Do this seat's part; the unit here then has weights of ``version``.

    Raises:
        Garbled: something arrived changed; the unit's version stays TORN.
    """
    target = None if part.target is None else units[part.target]
    read = reader(units, part.sources, device)

    def write(slot: Slot, name: str, box: Box) -> torch.Tensor:
        assert target is not None
        return target.tensor(slot, name)[box.within(target.box(name))]

    def dtype(slot: Slot) -> torch.dtype:
        assert target is not None
        return target.dtype(slot)

    if target is not None:
        target.counters["weight_version"] = TORN
    with torch.no_grad():
        for name, box in part.kept:
            write(Slot.PARAM, name, box).copy_(read(Slot.PARAM, name, box))
        if group is not None:
            wrong = exchange(group, part.buckets, read, write, dtype, device)
            if wrong:
                raise Garbled(wrong[0])
    if target is not None:
        target.counters["weight_version"] = version
