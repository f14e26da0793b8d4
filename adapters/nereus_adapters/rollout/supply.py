"""Supply: the versions of a trainer's weights that engines hold or are to get."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress

from nereus_adapters.rollout.hosts import HostLost, Hosts
from nereus_adapters.rollout.ports import Engine, EngineError, EngineLost
from nereus_adapters.rollout.source import Trainer
from nereus_adapters.rollout.store import Store
from nereus_adapters.rollout.weights import GarbledWeights, Published
from nereus_core.errors import NereusError


class Supply:
    """Publishes what a trainer has, once, and gives it to engines. Thread-safe."""

    def __init__(self, trainer: Trainer, hosts: Hosts) -> None:
        self.store = Store(hosts)
        self._trainer = trainer
        self._publishing = threading.Lock()

    def ensure(self, version: int) -> None:
        """Have a version in the store, whole: the trainer's newest is published where it is not."""
        with self._publishing:
            if version == self._trainer.version and not self._whole(version):
                self._trainer.publish(self.store)

    def _whole(self, version: int) -> bool:
        return version in self.store and self.store.hosts.holds(self.store.get(version))

    def deliver(self, version: int, engines: Iterable[Engine]) -> None:
        """Bring a version to the hosts of engines, all at once; `load` brings what this did not."""
        places = [(engine.layout, engine.devices[0]) for engine in engines if engine.alive]
        with suppress(NereusError):
            self.store.hosts.deliver(self.store.get(version), places)

    def load(self, engine: Engine, version: int) -> None:
        """Give an engine a version that is in the store.

        The trainer's newest is published once more if it is garbled, or if a host is gone that had
        a part of it.

        Raises:
            GarbledWeights: a digest differed twice.
            EngineError: the engine failed at it, or hosts failed to bring it there.
            EngineLost: its host is gone, or one that has weights for it, twice.
        """
        published = self.store.get(version)
        try:
            self._give(engine, published)
            return
        except HostLost:
            self.ensure(version)  # where it was not the engine's own host
        except GarbledWeights:
            if version != self._trainer.version:
                raise
            with self._publishing:
                if self.store.get(version) is published:  # nobody has done it meanwhile
                    self._trainer.publish(self.store)
        except EngineError:
            if self.store.get(version) is published:
                raise
            # Another engine had it published once more: the segments went while this one read.
        try:
            self._give(engine, self.store.get(version))
        except HostLost as error:
            doing = f"get weights version {version}"
            raise EngineLost(engine.name, doing, str(error)) from error

    def _give(self, engine: Engine, published: Published) -> None:
        try:
            manifest = self.store.hosts.manifest(published, (engine.layout, engine.devices[0]))
        except (GarbledWeights, HostLost):
            raise
        except NereusError as error:  # a host that failed, or did not answer in time
            doing = f"get weights version {published.version}"
            raise EngineError(engine.name, doing, str(error)) from error
        engine.update_weights(published.version, manifest)
