"""Standalone: the replicas of a separate_async job, which have devices of their own.

They never sleep: what goes on is generated with goes on while the trainers change. A new replica
is started closed: requests that reach it wait. It is on the load balancer from the epoch switch,
and verl's weight synchronization, which comes next, gives it its weights and opens it. A replica
that leaves is taken from the balancer first and its requests are aborted: verl's client takes what
each has generated to another replica, which goes on from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray

from nereus_adapters.ray_calls import apart
from nereus_adapters.verl.fleet import Fleet
from nereus_adapters.verl.rollouts import Rollouts, shutdown_engine
from nereus_core.cluster import Device
from nereus_core.units import Unit, UnitId

RANKS = itertools.count(1_000_000)
"""As in `rollouts`, whose own they are not."""
SHUTDOWN_S = 30.0
"""For a server to end what it started, before it is killed. Chosen, not measured."""


class Standalone(Rollouts):
    """Replicas by unit, as `Rollouts` has them.

    Args:
        trainer: verl's trainer.
        units: Of the replicas there are, in verl's order.
        fleet: Whose bundles they are started in.
        timeout_s: For a replica to start, stop or answer.
    """

    def __init__(
        self, trainer: Any, units: Mapping[UnitId, Unit], fleet: Fleet, timeout_s: float
    ) -> None:
        self._manager, self._fleet, self._timeout_s = (
            trainer.standalone_server_manager, fleet, timeout_s,
        )  # fmt: skip
        self._trainer = trainer
        self.replicas = dict(zip(units, self._manager.rollout_replicas, strict=True))
        self._linked = set(self.replicas)
        self._devices = {unit.id: unit.devices for unit in units.values()}

    def start(self, unit: Unit) -> None:
        """Start a closed replica for a unit; raises WaitTimeout where it does not come up."""
        from omegaconf import open_dict
        from verl.single_controller.ray.base import RayWorkerGroup
        from verl.utils.device import get_device_name
        from verl.workers.rollout.replica import RolloutMode

        manager, rank = self._manager, next(RANKS)
        config = manager.rollout_config.copy()
        with open_dict(config):
            config.tensor_model_parallel_size = unit.layout.tp
        replica = manager.rollout_replica_class(
            replica_rank=rank,
            config=config,
            model_config=manager.model_config,
            gpus_per_node=max(int(config.n_gpus_per_node), len(unit.devices)),
        )
        pool = self._fleet.bundles.hold(unit.devices, unit.id, f"rollout_{rank}")
        self._devices[unit.id] = unit.devices

        async def up() -> None:  # as init_standalone does, in this pool
            replica.rollout_mode, replica.resource_pool = RolloutMode.STANDALONE, pool
            replica.workers = RayWorkerGroup(
                resource_pool=pool,
                ray_cls_with_init=replica.get_ray_class_with_init_args(),
                bin_pack=False,
                name_prefix=f"rollout_standalone_{rank}",
                use_gpu=True,
                device_name=get_device_name(),
            ).workers
            await replica.launch_servers()
            await replica.abort_all_requests()

        try:
            self._wait(up, f"a rollout server for {unit.id}")
        except BaseException:
            self._end(unit.id, replica)
            raise
        self.replicas[unit.id] = replica

    def end(self, unit: UnitId) -> None:
        """End a unit's replica: at once, or with the epoch switch where the job may need it."""
        if unit not in self._linked and unit in self.replicas:
            self._leave([unit])

    def leave(self, devices: Iterable[Device] | None = None) -> None:
        """Do nothing: what leaves frees its devices."""

    def link(self, units: Mapping[UnitId, Unit], *, anew: bool = False) -> None:
        """Serve with these units from here on; the balancer is not empty at any moment.

        Args:
            units: Of the replicas that serve.
            anew: Tell the balancer of all of them, whatever it has been told.
        """
        manager = self._manager
        gone = [unit for unit in self._linked if unit not in units]
        fresh = [self.replicas[u] for u in units if anew or u not in self._linked]
        if fresh:
            servers = {r._server_address: r._server_handle for r in fresh}
            balancer = manager.global_load_balancer
            self._get(balancer.add_servers.remote(servers), "the load balancer to add servers")
        self._linked = set(units)
        replicas = [self.replicas[unit] for unit in units]
        manager.rollout_replicas = replicas
        manager.server_handles = [r._server_handle for r in replicas]
        manager.server_addresses = [r._server_address for r in replicas]
        self._trainer.standalone_checkpoint_manager.replicas = replicas
        self._leave(gone)

    def _leave(self, units: list[UnitId]) -> None:
        """Let replicas go: from the balancer, then what they do, then what they are."""
        if not units:
            return
        leaving = [self.replicas[unit] for unit in units]
        balancer = self._manager.global_load_balancer
        addresses = [r._server_address for r in leaving]
        self._get(balancer.remove_servers.remote(addresses), "the load balancer to let servers go")
        self._turn_away(leaving)
        for unit, replica in zip(units, leaving, strict=True):
            del self.replicas[unit]
            self._end(unit, replica)

    def _end(self, unit: UnitId, replica: Any) -> None:
        for server in replica.servers:
            with suppress(Exception):  # a server that does not answer is ended all the same
                ray.get(apart(server, shutdown_engine), timeout=SHUTDOWN_S)
        for actor in (*replica.servers, *replica.workers):
            ray.kill(actor)
        self._fleet.bundles.let_go(self._devices.pop(unit), unit)
