"""Bundles of Ray for devices that a job did not start with: where there are free ones, and places.

A device that joins is a bundle of a placement group that Nereus asks for; the group is given back
when nobody is on its devices any more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from nereus_adapters.ray_calls import outcome
from nereus_core.errors import DevicesMissing, SeamBroken, SeatDead

PLACED_S = 30.0
"""For Ray to place bundles on devices that it has free, those among them that it is just taking
back. Chosen, not measured."""
PIN = 0.001
"""Of a node's own resource ``node:ADDRESS``, of which Ray gives each node 1."""
_log = logging.getLogger("nereus")
_PROBE = 0.01
"""Of a device, for a task that says which it is; less than models leave that share one. Chosen."""


@dataclass(frozen=True, slots=True)
class Free:
    """What Ray has free on one node."""

    count: int
    """Whole GPUs, each with a CPU beside it."""
    kind: frozenset[str]
    """Accelerators of the node as Ray's resources name them; empty where it does not know."""


def free_by_node() -> dict[str, Free]:
    """Return what is free on each node that is alive, by address.

    Ray tells a sum over the devices of a node: shares of several may add up to one that is nowhere
    whole. Of two nodes with one address (on one host), that which has more is told.

    Source: ray._private.state.available_resources_per_node, ray 2.55.

    Raises:
        SeamBroken: this Ray does not tell it.
    """
    try:
        from ray._private.state import available_resources_per_node
    except (ImportError, AttributeError) as error:
        where = "ray._private.state:available_resources_per_node"
        raise SeamBroken(where, f"{error}; without backend.max_devices it is not needed") from error
    found: dict[str, Free] = {}
    available = available_resources_per_node()
    for node in ray.nodes():
        if node["Alive"]:
            left = available.get(node["NodeID"], {})
            count = int(min(left.get("GPU", 0.0), left.get("CPU", 0.0)))
            free, address = Free(count, _kind(node["Resources"])), node["NodeManagerAddress"]
            found[address] = max(free, found.get(address, free), key=lambda one: one.count)
    return found


def _kind(resources: Any) -> frozenset[str]:
    return frozenset(name for name in resources if name.startswith("accelerator_type:"))


def placed(node: str, count: int, cpus: int = 1) -> Any:
    """Return a new placement group of so many bundles of one GPU, and some CPUs, on a node.

    Raises:
        DevicesMissing: Ray has not as many free there; nothing is left behind.
    """
    bundles = [one_of(node, cpus) for _ in range(count)]
    group = placement_group(bundles, strategy="STRICT_PACK")
    if not group.wait(PLACED_S):
        removed(group)
        free = free_by_node().get(node, Free(0, frozenset()))
        raise DevicesMissing(f"free GPU ({node})", count, free.count)
    return group


def one_of(node: str, cpus: int = 1) -> dict[str, float]:
    """Return a bundle for one device of a node, and some CPUs."""
    return {"GPU": 1, "CPU": cpus, f"node:{node}": PIN}


def removed(group: Any) -> bool:
    """Give a placement group back to Ray, which ends all actors that are in it.

    Returns whether Ray has taken it; where not, it says why, and it goes with the job.
    """
    try:
        remove_placement_group(group)
    except Exception as error:  # whatever Ray's own server says that is busy or restarts
        _log.warning("a placement group could not be given back to Ray: %s", error)
        return False
    return True


def gpus_of(group: Any, count: int, timeout_s: float) -> list[int]:
    """Say which GPU of its node each bundle of a group is.

    Raises:
        WaitTimeout: Ray did not start a process in each bundle in time.
    """
    probe = ray.remote(num_cpus=0, num_gpus=_PROBE)(_own_gpu)
    asked = [
        probe.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
        ).remote()
        for index in range(count)
    ]
    return list(outcome(asked, f"{count} bundles to say which devices they are", timeout_s))


def on_node(address: str) -> NodeAffinitySchedulingStrategy:
    """Say that an actor is to be on a node and nowhere else.

    Raises:
        SeatDead: the node is gone.
    """
    for node in ray.nodes():
        if node["Alive"] and node["NodeManagerAddress"] == address:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    raise SeatDead(f"on {address}", None, "an actor to start there")


def _own_gpu() -> int:
    return int(ray.get_gpu_ids()[0])
