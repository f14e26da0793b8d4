"""Swap: units of the generate stage in the place of others, on the same devices.

Where an engine may be put beside another (`EngineFactory.beside`, and there is memory for both),
new ones are started while the old ones still serve, and take their place at once: a failure leaves
the old ones untouched. A vLLM seat holds one rank, an engine on a GPU most of the memory: there,
old engines end first. Weights are checked before; should the new engines not come up, the old ones
are built again on their devices from the same version, and a unit that cannot be is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from nereus_adapters.rollout.fleet import raise_first, together
from nereus_adapters.rollout.job import RolloutJob
from nereus_adapters.rollout.ports import Engine
from nereus_core.phases import Enter, Phase
from nereus_core.units import Unit, UnitId


class Swap:
    """One exchange of units.

    Args:
        running: the job.
        old: units that end.
        new: units that take their devices.
        version: of the weights that the new ones serve.
    """

    def __init__(
        self, running: RolloutJob, old: tuple[Unit, ...], new: tuple[Unit, ...], version: int
    ) -> None:
        self._running, self._old, self._new, self._version = running, old, new, version

    def beside(self, enter: Enter, require: Callable[[Unit], None]) -> None:
        """Start new engines beside the old ones, which end when the new ones serve.

        Args:
            enter: told of phases.
            require: raises when a unit's devices are gone.
        """
        engines: dict[Unit, Engine] = {}
        try:
            enter(Phase.TRANSFER)
            self._start(self._new, engines)
            enter(Phase.VERIFY)  # engines have checked every cell's digest
            enter(Phase.COMMIT)
            for unit in (*self._old, *self._new):
                require(unit)
        except BaseException:
            together([engine.close for engine in engines.values()])  # what went wrong is raised
            raise
        self._running.exchange([unit.id for unit in self._old], engines)

    def instead(self, enter: Enter, require: Callable[[Unit], None]) -> None:
        """End the old engines and start the new ones; should that fail, the old ones again."""
        running = self._running
        enter(Phase.TRANSFER)
        enter(Phase.VERIFY)
        places = [(unit.layout, unit.devices[0]) for unit in self._new]
        running.factory.hosts.check(running.supply.store.get(self._version), places)
        enter(Phase.COMMIT)
        for unit in (*self._old, *self._new):
            require(unit)
        engines: dict[Unit, Engine] = {}
        try:
            running.exchange([unit.id for unit in self._old], {})
            self._start(self._new, engines)
            for unit in self._new:
                require(unit)
        except BaseException:
            together([engine.close for engine in engines.values()])  # what went wrong is raised
            self._back()
            raise
        running.exchange((), engines)

    def _start(self, units: tuple[Unit, ...], into: dict[Unit, Engine]) -> None:
        """Start engines, all at once, with their weights."""

        def start(unit: Unit) -> None:
            into[unit] = self._running.start(unit, self._version)

        raise_first(together([lambda unit=unit: start(unit) for unit in units]))  # type: ignore[misc]

    def _back(self) -> None:
        """Build the old units again; one that does not come up or has no device is lost."""
        running = self._running
        failed = running.job.cluster.failed
        intact = tuple(u for u in self._old if failed.isdisjoint(u.devices))
        engines: dict[Unit, Engine] = {}
        lost: list[UnitId] = [unit.id for unit in self._old if unit not in intact]

        def start(unit: Unit) -> None:
            try:
                engines[unit] = running.start(unit, self._version)
            except Exception:
                lost.append(unit.id)
                raise

        errors = together([lambda unit=unit: start(unit) for unit in intact])  # type: ignore[misc]
        running.exchange((), engines)
        for unit in lost:
            running.lose(unit)
        raise_first(errors)
