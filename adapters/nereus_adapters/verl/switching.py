"""Switch: from the units that a trainer steps on to others, all at once, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nereus_adapters.ray_calls import call_all
from nereus_adapters.verl import shards
from nereus_adapters.verl.fleet import Fleet
from nereus_adapters.verl.relinking import Assembly, assembly, forget_dispatch, repoint, rewire
from nereus_adapters.verl.rollouts import Rollouts
from nereus_adapters.verl.ulysses import Ulysses
from nereus_core.cluster import Device
from nereus_core.errors import NereusError, TransitionFailed, UnitLost
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import Stage


class Switch:
    """The epoch switch of one job.

    Args:
        trainer: verl's trainer.
        fleet: Its worker processes.
        rollouts: Its replicas.
        order: Devices in the order of ranks.
        ulysses: Ranks that share each sequence.
        timeout_s: For each thing that is awaited.
    """

    def __init__(
        self,
        trainer: Any,
        fleet: Fleet,
        rollouts: Rollouts,
        order: Sequence[Device],
        ulysses: Ulysses,
        timeout_s: float,
    ) -> None:
        self._trainer, self._fleet, self._rollouts = trainer, fleet, rollouts
        self._order, self._ulysses, self._timeout_s = order, ulysses, timeout_s

    def run(self, before: UnitMap, after: UnitMap) -> None:
        """Let the trainer step on ``after``, whose states are staged.

        Raises:
            TransitionFailed: it steps on ``before`` as it did.
            UnitLost: it can step on neither.
        """
        try:
            old, new = (assembly(u, self._order, self._ulysses) for u in (before, after))
            self._hold(old)
        except Exception as error:
            self._abandon(before, after)
            raise self._failed(before, error) from error
        try:
            rewire(self._trainer, self._fleet, self._rollouts, old, new, after, self._timeout_s)
            self._point(old, new)
            self._rollouts.link(serving(after))
        except Exception as error:  # torch's and Ray's too: the ranks must meet again
            self._back(before, old, new, error)
            self._abandon(before, after)
            raise self._failed(before, error) from error
        self._settle(before, after, after)

    def _hold(self, old: Assembly) -> None:
        """Stage what the engines hold, without a copy: what a way back is built from."""
        units = {device: ({s.role: s.unit for s in seats},) for device, seats in old.items()}
        call_all(
            self._fleet.living(old), shards.hold,
            awaited="the states that run", timeout_s=self._timeout_s, each=units,
        )  # fmt: skip

    def _back(self, before: UnitMap, old: Assembly, new: Assembly, error: Exception) -> None:
        """Let the old ranks meet again."""
        try:
            rewire(self._trainer, self._fleet, self._rollouts, new, old, before, self._timeout_s)
            self._point(new, old)
            self._rollouts.link(serving(before), anew=True)
        except Exception as worse:
            raise UnitLost(tuple(before), (), f"{error}; and the old ranks: {worse}") from error

    def _abandon(self, before: UnitMap, after: UnitMap) -> None:
        """Forget the units that were made."""
        for unit in serving(after):
            if unit not in before:
                self._rollouts.end(unit)
        self._settle(before, after, before)

    def _failed(self, before: UnitMap, error: Exception) -> TransitionFailed:
        return TransitionFailed("the epoch switch", error, intact=tuple(before), rolled_back=True)

    def _point(self, old: Assembly, new: Assembly) -> None:
        if tuple(old) != tuple(new):
            repoint(self._trainer, self._fleet, tuple(new))
        forget_dispatch(self._trainer)

    def _settle(self, before: UnitMap, after: UnitMap, kept: UnitMap) -> None:
        """Free staged states and devices; a rank that is gone will be missed by the next step."""
        names = [str(unit) for unit in (*before, *after)]
        devices = _training(before) | _training(after)
        in_use = {d for unit in kept.values() for d in unit.devices}
        self._trainer._get_n_gpus_for_throughput = lambda: len(in_use)
        with suppress(NereusError):
            call_all(
                self._fleet.living(sorted(devices)), shards.drop, names,
                awaited="staged states to be freed", timeout_s=self._timeout_s,
            )  # fmt: skip
        self._rollouts.leave(self._fleet.leaving(_training(kept)))
        self._fleet.release(_training(kept))


def serving(units: UnitMap) -> dict[UnitId, Unit]:
    """Return the rollout replicas among units."""
    return {u.id: u for u in units.values() if u.model_stage.stage is Stage.GENERATE}


def _training(units: UnitMap) -> set[Device]:
    """Return the devices of all units but rollout replicas."""
    kept = (u for u in units.values() if u.model_stage.stage is not Stage.GENERATE)
    return {device for unit in kept for device in unit.devices}
