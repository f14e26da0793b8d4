"""Rollouts: the replicas of a verl job's rollout, started and ended one by one.

A new replica is started beside those that serve, which sleep at the boundary, and put to sleep in
turn: verl's own weight synchronization, the next thing that happens after the boundary, wakes all
of them and gives them the trainer's weights. The load balancer learns of it at the epoch switch. A
replica that is taken out of service then stays as it is, asleep, for the next change that wants its
layout on its devices.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import ray

from nereus_adapters.ray_calls import apart
from nereus_adapters.verl.ending import end
from nereus_adapters.verl.fleet import Fleet
from nereus_adapters.verl.inside_server import is_well
from nereus_adapters.verl.sleeping import Sleeper, Sleepers
from nereus_adapters.verl.turning import turned_away
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, WaitTimeout
from nereus_core.units import Unit, UnitId

_log = logging.getLogger("nereus")
ANSWER_S = 30.0
"""For a server that slept to say that it is well. Chosen, not measured."""
EACH = 0.9
"""Of the time that all replicas have to let requests go, what each has: one that hangs is known
before that is over. Chosen, not measured."""
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
        self._asynchronous = trainer.trainer_mode != "sync"
        self._trainer, self._fleet, self._timeout_s = trainer, fleet, timeout_s
        self.replicas = dict(zip(units, self._manager.rollout_replicas, strict=True))
        self._linked = set(self.replicas)
        self._sleepers, self._lock = Sleepers(sleepers), threading.Lock()
        self._woken: set[UnitId] = set()
        """Whose replicas slept, and are not in service yet."""

    def start(self, unit: Unit) -> None:
        """Have a replica for a unit that sleeps: one that did already, or a new one.

        Raises:
            WaitTimeout: a new one did not come up in time.
        """
        with self._lock:  # units are started at once
            found = self._sleepers.take(unit.layout.tp, self._seats(unit.devices))
        if found is not None and self._answers(found):
            self.replicas[unit.id] = found
            self._woken.add(unit.id)
            return
        from verl.workers.rollout.replica import RolloutMode

        on_node = max(Counter(device.node for device in unit.devices).values())
        replica = self._made(unit, next(_RANKS), on_node)
        replica.rollout_mode = RolloutMode.HYBRID  # as init_hybrid does, with these workers
        replica.workers = list(self._fleet.workers(unit.devices).values())

        async def up() -> None:
            await replica.launch_servers()
            if self._asynchronous:  # verl opens all of them after the next sync
                await replica.abort_all_requests()
            await replica.sleep()

        try:
            self._wait(up, f"a rollout server for {unit.id}")
        except BaseException:
            end([replica])
            raise
        self.replicas[unit.id] = replica

    def _made(self, unit: Unit, rank: int, gpus_per_node: int) -> Any:
        """Return verl's object for a unit's replica, of which nothing has been started."""
        from omegaconf import open_dict

        manager = self._manager
        config = manager.rollout_config.copy()
        with open_dict(config):
            config.tensor_model_parallel_size = unit.layout.tp
        return manager.rollout_replica_class(
            replica_rank=rank,
            config=config,
            model_config=manager.model_config,
            gpus_per_node=gpus_per_node,
        )

    def leave(self, devices: Iterable[Device] | None = None) -> None:
        """End the replicas that sleep on any of some devices; on any at all by default."""
        asleep = self._sleepers.leave(None if devices is None else self._seats(devices))
        self._end_with_doors(asleep, asleep)

    def end(self, unit: UnitId) -> None:
        """End a unit's replica: at once, or with the epoch switch where the job may need it.

        One that was woken for it sleeps again.
        """
        if unit not in self._linked:
            replica = self.replicas[unit]
            leave = self._manager.global_load_balancer.remove_servers
            self._get(leave.remote([replica._server_address]), "the load balancer to let go")
            del self.replicas[unit]
            if unit in self._woken:
                self._woken.remove(unit)
                self._retire([replica])
            else:
                self._end_with_doors([replica], self._turned_away([replica]))

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
        leaving = [self.replicas[unit] for unit in gone]
        if leaving:
            addresses = [r._server_address for r in leaving]
            self._get(
                balancer.remove_servers.remote(addresses), "the load balancer to let servers go"
            )
        self._list(units)  # verl synchronizes none that is put aside, whatever fails from here on
        for unit in gone:
            del self.replicas[unit]
        self._woken -= self._linked
        self._retire(leaving)

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

    def _retire(self, replicas: Sequence[Any]) -> None:
        """Let replicas that no request goes to sleep on; the oldest make room for them."""
        turned = self._turned_away(replicas)
        crowded = []
        for replica in turned:
            seats = tuple(worker._actor_id for worker in replica.workers)
            tp = int(replica.config.tensor_model_parallel_size)
            crowded += self._sleepers.keep(Sleeper(replica, tp, seats))
        waiting = [replica for replica in replicas if replica not in turned]
        self._end_with_doors([*crowded, *waiting], crowded)

    def _end_with_doors(self, replicas: Sequence[Any], turned: Sequence[Any]) -> None:
        """End replicas; in an asynchronous job those of them that turn requests away keep a door.

        All that sleep do, and have since they fell asleep.
        """
        end(replicas, doors=turned if self._asynchronous else ())

    def _seats(self, devices: Iterable[Device]) -> list[Any]:
        return [worker._actor_id for worker in self._fleet.workers(devices).values()]

    def _answers(self, replica: Any) -> bool:
        """Whether a replica is as it was, and holds requests back; one that is not is ended."""
        try:
            asked = [apart(server, is_well) for server in replica.servers]
            if all(ray.get(asked, timeout=ANSWER_S)):
                if self._asynchronous:  # until now it has turned them away
                    self._wait(replica.abort_all_requests, "a sleeping rollout server to close")
                return True
        except (NereusError, ray.exceptions.RayError) as error:
            _log.warning("a replica that slept is started anew: %s", error)
        end([replica])
        return False

    def _turned_away(self, replicas: Sequence[Any]) -> list[Any]:
        """Let requests go that an asynchronous job has on replicas that leave.

        Returns:
            Those at which none is left that would wait for as long as they sleep. The others are
            ended with what they have: verl gives up the prompts of these requests.
        """
        if not self._asynchronous or not replicas:
            return list(replicas)
        try:
            found = self._wait(
                lambda: turned_away(replicas, EACH * self._timeout_s),
                "the requests of replicas that leave to stop",
            )
        except (NereusError, ray.exceptions.RayError) as error:
            ranks = ", ".join(str(replica.replica_rank) for replica in replicas)
            _log.warning("rollout replicas %s are ended with their requests: %s", ranks, error)
            return []
        return list(found)

    def _get(self, answer: Any, awaited: str) -> None:
        try:
            ray.get(answer, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise WaitTimeout(awaited, self._timeout_s) from error

    def _wait(self, work: Callable[[], Coroutine[Any, Any, Any]], awaited: str) -> Any:
        """Run a coroutine of verl's on a loop of its own, for as long as it is given."""

        async def limited() -> Any:
            return await asyncio.wait_for(work(), self._timeout_s)

        returned: list[Any] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                returned.append(asyncio.run(limited()))
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name=awaited, daemon=True)
        thread.start()
        thread.join(self._timeout_s + 5)  # some of verl's coroutines block without awaiting
        if thread.is_alive() or (raised and isinstance(raised[0], TimeoutError)):
            raise WaitTimeout(awaited, self._timeout_s)
        if raised:
            raise raised[0]
        return returned[0]
