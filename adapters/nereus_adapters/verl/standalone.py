"""Standalone: the replicas of a separate_async job, which have devices of their own.

They never sleep: what goes on is generated with goes on while the trainers change. A new replica
is started closed: requests that reach it wait. It is on the load balancer from the epoch switch,
and verl's weight synchronization, which comes next, gives it its weights and opens it; amid a step
one is made at once. A replica that leaves is taken from the balancer first and its requests are
aborted: verl's client takes what each has generated to another replica, which goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray

from nereus_adapters.ray_calls import outcome
from nereus_adapters.verl.ending import end
from nereus_adapters.verl.fleet import Fleet
from nereus_adapters.verl.limits import limited
from nereus_adapters.verl.placing import started_in
from nereus_adapters.verl.rollouts import _RANKS, Rollouts
from nereus_core.cluster import Device
from nereus_core.errors import PrimitiveError, WaitTimeout
from nereus_core.units import Unit, UnitId


class Standalone(Rollouts):
    """Replicas by unit, as `Rollouts` has them.

    Args:
        trainer: verl's trainer.
        units: Of the replicas there are, in verl's order.
        fleet: Whose bundles they are started in.
        timeout_s: For a replica to start, stop or answer.
        amid_step: Says whether a step is under way, at whose end alone verl synchronizes weights.
    """

    def __init__(
        self,
        trainer: Any,
        units: Mapping[UnitId, Unit],
        fleet: Fleet,
        timeout_s: float,
        amid_step: Callable[[], bool],
    ) -> None:
        super().__init__(trainer, units, fleet, timeout_s, sleepers=0)
        self._amid_step, self._units = amid_step, dict(units)
        self._leaving: set[UnitId] = set()
        """Units that have ended and whose replicas serve until the epoch switch."""
        self._closed = self._late = False
        """Whether a synchronization amid a step has left replicas closed; whether it may go on."""

    def _managers(self, trainer: Any) -> tuple[Any, Any]:
        return trainer.standalone_server_manager, trainer.standalone_checkpoint_manager

    def start(self, unit: Unit) -> None:
        """Have a replica for a unit: one that is about to leave the same devices, or a closed one.

        Raises:
            WaitTimeout: a new one did not come up in time.
            DevicesMissing, Infeasible: there is no place for one.
        """
        wanted = (unit.devices, unit.layout)
        with self._lock:  # units are started at once
            for leaving in self._leaving:
                known = self._units[leaving]
                if (known.devices, known.layout) == wanted:  # an end that is undone
                    self._leaving.discard(leaving)
                    self._units[unit.id], self.replicas[unit.id] = unit, self.replicas[leaving]
                    self._fleet.bundles.hold(unit.devices, unit.id)
                    return
        self.replicas[unit.id] = self._started(unit)

    def _started(self, unit: Unit) -> Any:
        from verl.workers.rollout.replica import RolloutMode

        rank, on_node = next(_RANKS), int(self._manager.rollout_config.n_gpus_per_node)
        replica = self._made(unit, rank, max(on_node, len(unit.devices)))
        replica.rollout_mode = RolloutMode.STANDALONE  # as init_standalone does, in these bundles
        bundles = self._fleet.bundles.hold(unit.devices, unit.id)
        self._units[unit.id] = unit

        async def up() -> None:
            replica.workers = started_in(
                replica.get_ray_class_with_init_args(),
                list(bundles.values()),
                f"rollout_standalone_{rank}",
                self._timeout_s,
            )
            await replica.launch_servers()
            await replica.abort_all_requests()

        try:
            self._wait(up, f"a rollout server for {unit.id}")
        except BaseException:
            end([replica])
            self._give_back(unit.id, replica)
            raise
        return replica

    def end(self, unit: UnitId) -> None:
        """End a unit's replica: at once, or with the epoch switch where the job may need it."""
        if unit in self._linked:
            self._leaving.add(unit)
        elif unit in self.replicas:
            self._leave([unit])

    def leave(self, devices: Iterable[Device] | None = None) -> None:
        """Do nothing: what leaves frees its devices."""

    def link(self, units: Mapping[UnitId, Unit], *, anew: bool = False) -> None:
        """Serve with these units from here on; the balancer is not empty at any moment.

        Args:
            units: Of the replicas that serve.
            anew: Ask the balancer whom it knows: what it was told last may have failed.
        """
        balancer = self._manager.global_load_balancer
        gone = [unit for unit in self._linked if unit not in units]
        known = {self.replicas[unit]._server_address for unit in self._linked}
        if anew:
            asked = balancer.get_all_servers.remote()
            named = outcome(asked, "the load balancer to name its servers", self._timeout_s)
            known = set(named)
        serving = (self.replicas[unit] for unit in units)
        fresh = {
            r._server_address: r._server_handle for r in serving if r._server_address not in known
        }
        if fresh:  # one that the balancer has is not told again: it counts requests in flight
            self._get(balancer.add_servers.remote(fresh), "the load balancer to add servers")
        self._list(units)
        self._leaving.clear()
        if (fresh or self._closed) and self._amid_step():
            self._synchronize()
        self._leave(gone)

    def _synchronize(self) -> None:
        """Give the listed replicas their weights amid a step.

        verl closes all of them first and opens them as its last act, so one that fails leaves them
        closed to a job that waits for their answers: on the way back it is done again.

        Raises:
            PrimitiveError: the one before was late, so it may go on at any time from here on.
        """
        if self._late:
            raise PrimitiveError(
                "the last weight synchronization has not ended and replicas are closed for it; "
                "another cannot be made beside it"
            )
        served = int(self._trainer.global_steps) - 1  # nothing of this step is trained on yet
        self._closed = True
        try:
            limited(
                lambda: self._weights.update_weights(served),
                "weights for new replicas",
                self._timeout_s,
            )
        except WaitTimeout:
            self._late = True
            raise
        self._closed = False

    def _leave(self, units: Iterable[UnitId]) -> None:
        """Let replicas go: from the balancer, then what they do, then what they are."""
        kept, leaving, shared = dict(self.replicas), {}, []
        for unit in units:
            replica = kept.pop(unit)
            if any(other is replica for other in kept.values()):
                shared.append(unit)  # another unit goes on with it
            else:
                leaving[unit] = replica
        addresses = [r._server_address for r in leaving.values()]
        if addresses:
            balancer = self._manager.global_load_balancer
            self._get(
                balancer.remove_servers.remote(addresses), "the load balancer to let servers go"
            )
        self.replicas = kept
        for unit in shared:
            self._let_go(unit)
        replicas = list(leaving.values())
        self._end_with_doors(replicas, self._turned_away(replicas))
        for unit, replica in leaving.items():
            self._give_back(unit, replica)

    def _give_back(self, unit: UnitId, replica: Any) -> None:
        """End what was beside a replica's servers, and give its devices back."""
        for worker in replica.workers:
            ray.kill(worker)
        self._let_go(unit)

    def _let_go(self, unit: UnitId) -> None:
        self._fleet.bundles.let_go(self._units.pop(unit).devices, unit)
