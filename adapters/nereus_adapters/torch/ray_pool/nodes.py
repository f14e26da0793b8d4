"""Which Ray nodes hold a pool's seats, which are about to leave, and which have come.

One placement group holds all seats: a bundle for each node of the job's cluster. Where a node is
lost, Ray places its bundle on another as soon as there is one with enough free resources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import state as _state  # the drain notices have no public reader
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nereus_core.errors import DevicesMissing, WaitTimeout


class SeatNodes:
    """The bundles of a pool, one per node of the job; bundle k is the job's node k.

    Args:
        seats: how many seats each node has, by the job's node name.
        resources: what one seat takes, as Ray counts it: ``{"CPU": 1}`` or ``{"GPU": 1}``.
        timeout_s: longest wait for the bundles to be placed.

    Raises:
        DevicesMissing: the cluster does not have as much; nothing is kept.
        WaitTimeout: it has, but not free.
    """

    def __init__(
        self, seats: Mapping[str, int], resources: Mapping[str, float], timeout_s: float
    ) -> None:
        self._index = {node: k for k, node in enumerate(seats)}
        self._resources = dict(resources)
        bundles = [{r: n * each for r, each in resources.items()} for n in seats.values()]
        total = ray.cluster_resources()
        for resource, each in resources.items():
            need, have = sum(seats.values()) * each, total.get(resource, 0.0)
            if need > have:
                raise DevicesMissing(f"Ray {resource}", round(need), round(have))
        strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
        self._group: PlacementGroup = placement_group(bundles, strategy=strategy)
        if not self._group.wait(timeout_s):
            remove_placement_group(self._group)
            raise WaitTimeout(f"Ray to place {bundles} on {len(bundles)} nodes", timeout_s)

    def options(self, node: str) -> dict[str, Any]:
        """Return the Ray options of a seat's actor on one of the job's nodes."""
        taken = dict(self._resources)
        return {
            "num_cpus": taken.pop("CPU", 0),
            "num_gpus": taken.pop("GPU", 0),
            "resources": taken,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._index[node]
            ),
        }

    def beside(self, node: str) -> dict[str, Any]:
        """Return the Ray options of an actor on one of the job's nodes that takes nothing."""
        return {**self.options(node), "num_cpus": 0, "num_gpus": 0, "resources": {}}

    def placed(self) -> dict[str, str]:
        """Return the id of the Ray node under each of the job's nodes that has one now."""
        found = placement_group_table(self._group)  # empty where Ray does not know the group
        bundles = {} if found.get("state", "REMOVED") == "REMOVED" else found["bundles_to_node_id"]
        alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
        return {node: bundles[k] for node, k in self._index.items() if bundles.get(k) in alive}

    def remove(self) -> None:
        """Give the resources back; ends the actors that are left."""
        remove_placement_group(self._group)


def draining() -> frozenset[str]:
    """Return ids of nodes announced to leave (``ray drain-node``, spot notices of a cloud).

    Source: ray._private.state.GlobalState.get_draining_nodes, ray 2.60.
    """
    return frozenset(_state.get_draining_nodes())
