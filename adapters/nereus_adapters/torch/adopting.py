"""Adopting: a driver takes over what the seats of one that died hold.

Transfers that no seat has committed are abandoned; one that a seat has committed is committed by
the others too, as all of them had verified it. Then the units are those of which all shards stand.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Mapping

from nereus_adapters.torch.fleet import Fleet
from nereus_adapters.torch.values import Held, Inventory
from nereus_core.cluster import Device
from nereus_core.errors import NereusError
from nereus_core.units import Unit, UnitId
from nereus_core.workload import Stage


def adopt(fleet: Fleet) -> int:
    """Take over a fleet's seats; returns the RL steps that its train stages have done.

    Raises:
        NereusError: trained models have done different numbers of steps: the driver died inside
            one, with samples that nobody has any more.
    """
    pool = fleet.pool
    name = f"driver-{secrets.token_hex(8)}"
    fleet.settle(
        pool.send({device: ("adopted", {"name": name}) for device in pool.alive}), fleet.timeout_s
    )
    _finish_transfers(fleet)
    found = _inventories(fleet)
    units, torn = _gathered({d: i.units for d, i in found.items()})
    parked, rest = _gathered({d: i.parked for d, i in found.items()})
    fleet.replace((), units, parked)
    drops = [(d, ("drop", {"unit": unit})) for unit, devices in torn for d in devices]
    drops += [(d, ("unpark", {"unit": unit})) for unit, devices in rest for d in devices]
    for device, call in drops:
        fleet.settle(pool.send({device: call}), fleet.timeout_s)
    steps = {
        unit.model_stage: max(found[d].units[unit.id].step for d in unit.devices)
        for unit in units
        if unit.model_stage.stage is Stage.TRAIN
    }
    if len(set(steps.values())) > 1:
        said = ", ".join(f"{stage} has done {n} steps" for stage, n in sorted(steps.items()))
        raise NereusError(
            f"{said}: the driver died inside a step, whose samples are lost; resume from a "
            "checkpoint."
        )
    return max(steps.values(), default=0)


def _finish_transfers(fleet: Fleet) -> None:
    under_way: dict[str, dict[Device, bool]] = defaultdict(dict)
    for device, inventory in _inventories(fleet).items():
        for op, committed in inventory.transfers.items():
            under_way[op][device] = committed
    for op, seats in under_way.items():
        if any(seats.values()):
            _each(fleet, [d for d, committed in seats.items() if not committed], "commit", op)
            _each(fleet, list(seats), "release", op)
        else:
            _each(fleet, list(seats), "abandon", op)


def _each(fleet: Fleet, devices: list[Device], method: str, op: str) -> None:
    calls = {d: (method, {"op": op}) for d in devices}
    fleet.settle(fleet.pool.send(calls), fleet.timeout_s)


def _inventories(fleet: Fleet) -> dict[Device, Inventory]:
    pending = fleet.pool.send({device: ("inventory", {}) for device in fleet.pool.alive})
    answers = fleet.settle(pending, fleet.timeout_s)
    return {call.device: a.value for call, a in zip(pending, answers, strict=True)}


def _gathered(
    held: Mapping[Device, Mapping[UnitId, Held]],
) -> tuple[list[Unit], list[tuple[UnitId, list[Device]]]]:
    """Put shards together; returns whole units, and units that lack some shard, with devices."""
    shards: dict[UnitId, dict[int, tuple[Device, Held]]] = defaultdict(dict)
    for device, units in held.items():
        for unit, shard in units.items():
            shards[unit][shard.local_rank] = (device, shard)
    whole: list[Unit] = []
    torn: list[tuple[UnitId, list[Device]]] = []
    for unit, ranks in shards.items():
        layouts = {shard.layout for _, shard in ranks.values()}
        layout = min(layouts)
        if len(layouts) == 1 and len(ranks) == layout.num_devices:
            whole.append(Unit(unit, layout, tuple(ranks[r][0] for r in sorted(ranks))))
        else:
            torn.append((unit, [device for device, _ in ranks.values()]))
    return whole, torn
