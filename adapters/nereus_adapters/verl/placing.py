"""placing: the processes beside one rollout replica's servers, each in a bundle that is named.

verl's RayWorkerGroup starts such processes in neighboring bundles of one placement group. Devices
that came to a job one by one are in groups of their own, so they are started here, as it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nereus_adapters.ray_calls import outcome
from nereus_adapters.verl.bundles import COLOCATED, Bundle


def started_in(kind: Any, bundles: Sequence[Bundle], name: str, timeout_s: float) -> list[Any]:
    """Start one process in each of some bundles of one node; returns the actors, by rank.

    Args:
        kind: verl's RayClassWithInitArgs.
        bundles: One for each rank, in order.
        name: Of the processes, as Ray lists them.
        timeout_s: For Ray to answer from the first bundle.

    Raises:
        WaitTimeout: it did not.
    """
    from verl.single_controller.ray.base import get_master_addr_port
    from verl.utils.device import get_device_name

    first = PlacementGroupSchedulingStrategy(
        placement_group=bundles[0].group, placement_group_bundle_index=bundles[0].index
    )
    asked = get_master_addr_port.options(scheduling_strategy=first).remote()
    address, port = outcome(asked, f"an address for {name}", timeout_s)
    actors: list[Any] = []
    try:
        for rank, bundle in enumerate(bundles):
            ranks = {
                "WORLD_SIZE": str(len(bundles)),
                "RANK": str(rank),
                "RAY_LOCAL_WORLD_SIZE": str(len(bundles)),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "WG_PREFIX": name,
                "WG_BACKEND": "ray",
            }
            options = {"name": f"{name}_0:{rank}", "runtime_env": {"env_vars": ranks}}
            kind.update_options(options)
            actors.append(
                kind(
                    placement_group=bundle.group,
                    placement_group_bundle_idx=bundle.index,
                    use_gpu=True,
                    num_gpus=1 / COLOCATED,
                    device_name=get_device_name(),
                )
            )
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return actors
