"""Kept: processes of the conformance harness that go from one job to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from nereus_adapters.openrlhf import engines, ranks
from nereus_adapters.openrlhf.harness_look import WAIT_S
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.openrlhf.warm import Seat
from nereus_adapters.ray_calls import ask
from nereus_core.cluster import Device
from nereus_core.units import Unit
from nereus_core.workload import ModelStage

_MOST_IDLE = {1: 4, 2: 2}
"""Engines kept from one launch to the next, by tensor-parallel degree: what four devices hold."""


@dataclass(frozen=True, slots=True)
class _Idle:
    """An engine that no job has now."""

    tp: int
    handle: Any
    seat: Seat | None
    """None for one that OpenRLHF's own way started: after a way back."""


class Kept:
    """Ranks without a group, seats without an engine, and engines without a job."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[ModelStage, Device], Any] = {}
        self.waiting: list[Seat] = []
        self._idle: list[_Idle] = []

    def take(self, running: Running | None) -> None:
        """Take processes and engines back from a job that ends; engines beyond a number end.

        Raises:
            WaitTimeout, SeatDead: a rank does not leave its group.
        """
        if running is None:
            return
        self.ranks, self.waiting = running.ranks, running.waiting
        handles = list(self.ranks.values())
        ask(handles, ranks.leave, awaited="ranks to leave the last job", timeout_s=WAIT_S)
        ended = []
        for unit, handle in list(running.engines.items()):
            tp = running.alive[unit].layout.tp if unit in running.alive else 0
            have = sum(one.tp == tp for one in self._idle)
            if have < _MOST_IDLE.get(tp, 0) and unit not in running.opening:
                self._idle.append(_Idle(tp, handle, running.seated.pop(unit, None)))
                del running.engines[unit]
            else:
                ended.append(unit)
        engines.stop(running, ended)

    def give(self, running: Running, unit: Unit) -> None:
        """Give a unit an engine of its degree, if there is one."""
        found = next((one for one in self._idle if one.tp == unit.layout.tp), None)
        if found is not None:
            self._idle.remove(found)
            running.engines[unit.id] = found.handle
            if found.seat is not None:
                running.seated[unit.id] = found.seat

    def end(self, *jobs: Running | None) -> None:
        """End everything that a case may have broken, in these jobs too."""
        handles = [*self.ranks.values(), *(one.handle for one in self._idle)]
        handles += [seat.handle for seat in self.waiting]
        for running in filter(None, jobs):
            handles += [*running.ranks.values(), *running.engines.values()]
            handles += [seat.handle for seat in running.waiting]
        for handle in handles:
            ray.kill(handle)
        self.ranks, self.waiting, self._idle = {}, [], []
