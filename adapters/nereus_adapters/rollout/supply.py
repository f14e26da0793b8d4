"""Supply: the versions of a trainer's weights that engines hold or are to get."""

from __future__ import annotations

import threading

from nereus_adapters.rollout.ports import Engine, EngineError
from nereus_adapters.rollout.source import Trainer
from nereus_adapters.rollout.store import Store
from nereus_adapters.rollout.weights import GarbledWeights


class Supply:
    """Publishes what a trainer has, once, and gives it to engines. Thread-safe."""

    def __init__(self, trainer: Trainer) -> None:
        self.store = Store()
        self._trainer = trainer
        self._publishing = threading.Lock()

    def ensure(self, version: int) -> None:
        """Have a version in the store: the trainer's newest is published where it is not."""
        with self._publishing:
            if version == self._trainer.version and version not in self.store:
                self._trainer.publish(self.store)

    def load(self, engine: Engine, version: int) -> None:
        """Give an engine a version that is in the store; published once more if it is garbled.

        Raises:
            GarbledWeights: a digest differed twice.
            EngineError: the engine failed at it.
        """
        published = self.store.get(version)
        try:
            engine.update_weights(version, published.manifest(engine.layout))
            return
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
        engine.update_weights(version, self.store.get(version).manifest(engine.layout))
