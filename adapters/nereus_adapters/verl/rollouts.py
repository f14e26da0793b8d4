"""Rollouts: the replicas of a verl job's rollout, started and ended one by one.

A new replica is started beside those that serve, which sleep at the boundary, and put to sleep in
turn: verl's own weight synchronization, the next thing that happens after the boundary, wakes all
of them and gives them the trainer's weights. The load balancer learns of it at the epoch switch. A
replica that is taken out of service then stays as it is, asleep, for the next change that wants its
layout on its devices.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from nereus_adapters.ray_calls import apart
from nereus_adapters.verl.fleet import Fleet
from nereus_adapters.verl.sleeping import Sleeper, Sleepers
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, WaitTimeout
from nereus_core.units import Unit, UnitId

_RANKS = itertools.count(1000)
"""Ranks of replicas from here on are Nereus's own: verl numbers its own from 0 up. None comes twice
in a process: servers are known by them, and outlive the adapter that started them."""


class Rollouts:
    """Replicas by unit.

    Args:
        trainer: verl's trainer.
        units: Of the replicas there are, in verl's order.
        fleet: Worker processes.
        timeout_s: For a replica to start, stop or answer.
        sleepers: Replicas that may sleep beside each process, out of service.
    """

    def __init__(
        self,
        trainer: Any,
        units: Mapping[UnitId, Unit],
        fleet: Fleet,
        timeout_s: float,
        sleepers: int,
    ) -> None:
        self._manager, self._weights = self._managers(trainer)
        self._trainer, self._fleet, self._timeout_s = trainer, fleet, timeout_s
        self.replicas = dict(zip(units, self._manager.rollout_replicas, strict=True))
        self._linked = set(self.replicas)
        self._sleepers = Sleepers(sleepers)

    def start(self, unit: Unit) -> None:
        """Have a replica for a unit that sleeps: one that did already, or a new one.

        Raises:
            WaitTimeout: a new one did not come up in time.
        """
        found = self._sleepers.take(unit.layout.tp, self._seats(unit.devices))
        if found is not None and self._answers(found):
            self.replicas[unit.id] = found
            return
        from omegaconf import open_dict
        from verl.workers.rollout.replica import RolloutMode

        manager = self._manager
        config = manager.rollout_config.copy()
        with open_dict(config):
            config.tensor_model_parallel_size = unit.layout.tp
        replica = manager.rollout_replica_class(
            replica_rank=next(_RANKS),
            config=config,
            model_config=manager.model_config,
            gpus_per_node=max(Counter(d.node for d in unit.devices).values()),
        )
        replica.rollout_mode = RolloutMode.HYBRID  # as init_hybrid does, with these workers
        replica.workers = list(self._fleet.workers(unit.devices).values())

        async def up() -> None:
            await replica.launch_servers()
            if self._trainer.trainer_mode != "sync":  # verl opens all of them after the next sync
                await replica.abort_all_requests()
            await replica.sleep()

        try:
            self._wait(up, f"a rollout server for {unit.id}")
        except BaseException:
            _end(replica)
            raise
        self.replicas[unit.id] = replica

    def leave(self, devices: Iterable[Device] | None = None) -> None:
        """End the replicas that sleep on any of some devices; on any at all by default."""
        for replica in self._sleepers.leave(None if devices is None else self._seats(devices)):
            _end(replica)

    def end(self, unit: UnitId) -> None:
        """End a unit's replica: at once, or with the epoch switch where the job may need it."""
        if unit not in self._linked:
            replica = self.replicas.pop(unit)
            leave = self._manager.global_load_balancer.remove_servers
            self._get(leave.remote([replica._server_address]), "the load balancer to let go")
            _end(replica)

    def rank_of(self, unit: UnitId) -> int:
        """Return verl's rank of a unit's replica."""
        return int(self.replicas[unit].replica_rank)

    def link(self, units: Mapping[UnitId, Unit], *, anew: bool = False) -> None:
        """Serve with these units from here on; the balancer is not empty at any moment.

        Args:
            units: Of the replicas that serve.
            anew: Tell the balancer of all of them, whatever it has been told.
        """
        manager = self._manager
        gone = [u for u in self._linked if u not in units]
        fresh = {u: self.replicas[u] for u in units if anew or u not in self._linked}
        balancer = manager.global_load_balancer
        if fresh:
            servers = {r._server_address: r._server_handle for r in fresh.values()}
            self._get(balancer.add_servers.remote(servers), "the load balancer to add servers")
        if gone:
            leaving = [self.replicas[u]._server_address for u in gone]
            self._get(
                balancer.remove_servers.remote(leaving), "the load balancer to let servers go"
            )
        for unit in gone:
            self._turn_away(self.replicas[unit])
            self._retire(self.replicas.pop(unit))
        self._list(units)

    def _managers(self, trainer: Any) -> tuple[Any, Any]:
        """Return verl's manager of servers, and the one of weight synchronizations."""
        return trainer.llm_server_manager, trainer.checkpoint_manager

    def _list(self, units: Iterable[UnitId]) -> None:
        """Name the replicas of these units, and no others, in verl's own objects."""
        self._linked = set(units)
        replicas = [self.replicas[unit] for unit in units]
        manager = self._manager
        manager.rollout_replicas = replicas
        manager.server_handles = [r._server_handle for r in replicas]
        manager.server_addresses = [r._server_address for r in replicas]
        self._weights.replicas = replicas

    def _retire(self, replica: Any) -> None:
        """Let a replica that no request goes to sleep on; the oldest make room for it."""
        seats = tuple(worker._actor_id for worker in replica.workers)
        tp = int(replica.config.tensor_model_parallel_size)
        for crowded in self._sleepers.keep(Sleeper(replica, tp, seats)):
            _end(crowded)

    def _seats(self, devices: Iterable[Device]) -> list[Any]:
        return [worker._actor_id for worker in self._fleet.workers(devices).values()]

    def _answers(self, replica: Any) -> bool:
        """Whether a replica is as it was; one that is not is ended."""
        try:
            asked = [apart(server, is_well) for server in replica.servers]
            if all(ray.get(asked, timeout=self._timeout_s)):
                return True
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            pass  # it has died in its sleep, or hangs: a new one is started
        _end(replica)
        return False

    def _turn_away(self, replica: Any) -> None:
        """Let requests go that an asynchronous job has on a replica that is to end.

        verl's client takes what each has generated to another replica, which goes on from there.
        """
        if self._trainer.trainer_mode == "sync":
            return
        known = inspect.signature(replica.abort_all_requests).parameters
        # verl 0.9.0 has no such word: a request that waits fails, and verl asks for it anew.
        word = {"reject_request": True} if "reject_request" in known else {}
        with suppress(NereusError, ray.exceptions.RayError):
            # One that does not answer is ended all the same; verl asks anew for what it had.
            abort = partial(replica.abort_all_requests, **word)
            self._wait(abort, f"the requests of {replica._server_address} to stop")

    def _get(self, answer: Any, awaited: str) -> None:
        try:
            ray.get(answer, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise WaitTimeout(awaited, self._timeout_s) from error

    def _wait(self, work: Callable[[], Coroutine[Any, Any, None]], awaited: str) -> None:
        """Run a coroutine of verl's on a loop of its own, for as long as it is given."""

        async def limited() -> None:
            await asyncio.wait_for(work(), self._timeout_s)

        raised: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(limited())
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name=awaited, daemon=True)
        thread.start()
        thread.join(self._timeout_s + 5)  # some of verl's coroutines block without awaiting
        if thread.is_alive() or (raised and isinstance(raised[0], TimeoutError)):
            raise WaitTimeout(awaited, self._timeout_s)
        if raised:
            raise raised[0]


def is_well(server: Any) -> bool:
    """Whether a rollout server's engine is not known to have failed; runs inside it."""
    return not getattr(getattr(server, "engine", None), "errored", False)


def shutdown_engine(server: Any) -> None:
    """End what a rollout server started; runs inside it."""
    engine: Any = getattr(server, "engine", None)
    if hasattr(engine, "shutdown"):
        engine.shutdown()


def _end(replica: Any) -> None:
    for server in getattr(replica, "servers", []):
        with suppress(Exception):  # a server that does not answer is ended all the same
            ray.get(apart(server, shutdown_engine), timeout=30)
        ray.kill(server)
