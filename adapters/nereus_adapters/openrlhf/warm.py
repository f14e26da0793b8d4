"""Warm: processes for engines to come, whose imports are made while the job steps.

An engine's start is imports for the most part, one after the other: those of its actor, of vLLM's
engine core, of its workers. A seat is an actor of OpenRLHF's own engine class that has made them
and has no engine yet; it holds no device. An engine that ends leaves its seat behind, for the next
transition or until there are more than shall wait.

Engines that span nodes are started as OpenRLHF starts them.
"""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nereus_core.cluster import Device
from nereus_core.errors import SeatDead
from nereus_core.units import Unit
from nereus_core.workload import ACTOR_GENERATE

if TYPE_CHECKING:
    from nereus_adapters.openrlhf.running import Running


@dataclass(frozen=True, slots=True)
class Seat:
    """A process in which an engine is, or may be started."""

    handle: Any
    node: str


@functools.cache
def _seat_class() -> Any:
    """Return OpenRLHF's engine as an actor class whose engine is started by `open`."""
    import ray
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    engine = RolloutRayActor.__ray_metadata__.modified_class

    class EngineSeat(engine):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            from nereus_adapters.openrlhf import forking

            forking.install()

        def _configure_device_env(self, *_: object, **__: object) -> None:
            """Leave the environment alone: `open` was told the devices."""

        async def open(self, visible: str, arguments: dict[str, Any]) -> None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
            await engine.__init__(self, **arguments)

    return ray.remote(EngineSeat)


def replenish(running: Running, num_seats: int) -> None:
    """Start or end seats until so many wait, on the nodes of engines in turn; waits for none."""
    places = [unit.devices[0] for unit in running.alive.of(ACTOR_GENERATE)]
    places = [device for device in places if device not in running.leaving]
    left = {d.node for d in running.leaving} - {device.node for device in places}
    here = {device.node for device in running.bundles} - left
    stay = [seat for seat in running.waiting if seat.node in here][:num_seats]
    for seat in running.waiting:
        if seat not in stay:
            _end(seat)
    running.waiting[:] = stay
    for number in range(num_seats - len(running.waiting) if places else 0):
        with suppress(SeatDead):  # its node has just gone, and the next boundary sees that
            running.waiting.append(_start(running, places[number % len(places)]))


def take(running: Running, unit: Unit) -> Seat:
    """Return a seat on the node of a unit; starts one where none waits."""
    device = unit.devices[0]
    for seat in running.waiting:
        if seat.node == device.node:
            running.waiting.remove(seat)
            return seat
    return _start(running, device)


def _start(running: Running, device: Device) -> Seat:
    from nereus_adapters.ray_bundles import on_node

    handle = (
        _seat_class()
        .options(
            num_cpus=0,
            num_gpus=0,
            # Of no placement group: it holds no device, and outlives those that are given back.
            scheduling_strategy=on_node(device.node),
            # vLLM looks at devices when it is imported; none is touched before `open` names them.
            runtime_env={
                "env_vars": {
                    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                    "CUDA_VISIBLE_DEVICES": str(running.bundles[device].gpu or 0),
                }
            },
        )
        .remote()
    )
    return Seat(handle, device.node)


def _end(seat: Seat) -> None:
    import ray

    ray.kill(seat.handle)


def fits(running: Running, unit: Unit) -> bool:
    """Whether a seat can have a unit: it lies on one node, on devices whose index is known.

    Its processes are in no placement group; that keeps others off its devices. Devices that are
    still to join will have a group, and tell their index.
    """
    nodes = {device.node for device in unit.devices}
    bundles = [running.bundles[d] for d in unit.devices if d in running.bundles]
    return len(nodes) == 1 and all(b.pg is not None and b.gpu is not None for b in bundles)


def together(running: Running, unit: Unit) -> bool:
    """Whether actors of Ray can be the workers of an engine: in one placement group."""
    if not running.bundles.keys() >= set(unit.devices):
        return False
    groups = [running.bundles[device].pg for device in unit.devices]
    return None not in groups and len({pg.id for pg in groups}) == 1


def visible(running: Running, unit: Unit) -> str:
    """Return a unit's devices as CUDA_VISIBLE_DEVICES names them."""
    return ",".join(str(running.bundles[device].gpu) for device in unit.devices)
