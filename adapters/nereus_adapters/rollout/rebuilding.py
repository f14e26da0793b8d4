"""Rebuilds: an engine that failed is built again on its devices, while the others serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from nereus_adapters.rollout.fleet import Fleet, raise_first, together
from nereus_adapters.rollout.ports import Engine, EngineError, EngineLost
from nereus_core.errors import WaitTimeout
from nereus_core.units import Unit, UnitId


class Rebuilds:
    """Thread-safe.

    Args:
        fleet: whose engines they are.
        unit: gives a unit that is to have an engine; None for one that has gone.
        start: makes an engine of a unit, with a version of the weights.
        load: gives an engine a version.
        lose: told of a unit whose engine could not be built again; its engine has ended.
        wait_s: longest wait for a rebuild.
    """

    def __init__(
        self,
        fleet: Fleet,
        unit: Callable[[UnitId], Unit | None],
        start: Callable[[Unit, int], Engine],
        load: Callable[[Engine, int], None],
        lose: Callable[[UnitId], None],
        wait_s: float,
    ) -> None:
        self._fleet, self._unit, self._start, self._load = fleet, unit, start, load
        self._lose, self._wait_s = lose, wait_s
        self._lock = threading.Lock()
        self._one = threading.Lock()
        self._under_way: dict[UnitId, Future[None]] = {}
        self.count = 0
        """Engines that were rebuilt."""

    @property
    def under_way(self) -> bool:
        """Whether one is being rebuilt on a thread of its own."""
        with self._lock:
            return bool(self._under_way)

    def bring(self, units: Sequence[Unit], version: int) -> None:
        """Bring engines to a version, all at once; one that fails at it is rebuilt."""

        def bring(unit: Unit) -> None:
            engine = self._fleet.engine(unit.id)
            if engine.version == version:
                return
            try:
                self._load(engine, version)
            except (EngineError, EngineLost, WaitTimeout):
                self.now(unit, engine, version)

        raise_first(together([lambda unit=unit: bring(unit) for unit in units]))  # type: ignore[misc]

    def now(self, unit: Unit, failed: Engine, version: int) -> None:
        """Put a new engine in the place of one that failed, on the same devices, once."""
        with self._one:
            engine = self._fleet.engine(unit.id)
            if engine is not failed:  # somebody else has noticed too, and done it
                if engine.version != version:
                    self._load(engine, version)
                return
            failed.close()
            fresh = self._start(unit, version)
            try:
                self._fleet.replace(unit.id, fresh)
            except KeyError:  # the unit went meanwhile
                fresh.close()
                raise
            self.count += 1

    def soon(self, lost: UnitId) -> None:
        """Rebuild a lost engine on a thread of its own, once."""
        unit = self._unit(lost)
        failed = self._fleet.engines().get(lost)
        if unit is None or failed is None or failed.alive:
            return
        with self._lock:
            if lost in self._under_way:
                return
            done: Future[None] = Future()
            self._under_way[lost] = done

        def run() -> None:
            try:
                assert self._fleet.version is not None
                self.now(unit, failed, self._fleet.version)
            except Exception as error:
                try:
                    self._lose(lost)
                finally:
                    done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                with self._lock:
                    del self._under_way[lost]

        threading.Thread(target=run, name=f"nereus rebuild {lost}", daemon=True).start()

    def settled(self, units: Iterable[UnitId]) -> None:
        """Wait for rebuilds of units that are under way."""
        for unit in units:
            with self._lock:
                under_way = self._under_way.get(unit)
            if under_way is not None:
                try:
                    under_way.exception(self._wait_s)
                except TimeoutError:
                    raise WaitTimeout(f"the rebuilding of {unit}", self._wait_s) from None
